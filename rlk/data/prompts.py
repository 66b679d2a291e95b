"""The prompt file, and the order in which a run takes prompts from it.

The file has one JSON object a line: the prompt (a text, or a list of chat messages) and its right answer. A bad line is
an error at load, naming file and line: nothing has been written by then.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from rlk.config import nearest
from rlk.data.tokenizer import Tokenizer
from rlk.errors import UsageError
from rlk.rollout.engine import Prompt


@dataclass(frozen=True)
class Example:
    """One line of the prompt file."""

    tokens: tuple[int, ...]  # of the prompt
    answer: str


def load_prompts(path: str | Path, tokenizer: Tokenizer, prompt_key: str = "prompt", answer_key: str = "answer",
                 longest: int | None = None) -> list[Example]:
    """Read and tokenize a prompt file. `longest` is the most tokens that a prompt may have.

    Raises UsageError, with the line's number, for a line that is not JSON, lacks a column, or is too long.
    """
    path = Path(path)
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except FileNotFoundError:
        raise UsageError(f"no prompt file {path}: give one with --prompts") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read the prompt file {path}: {error}") from None
    examples = [_example(text, f"{path} line {number}", tokenizer, prompt_key, answer_key, longest)
                for number, text in enumerate(lines, start=1) if text.strip()]
    if not examples:
        raise UsageError(f"{path} has no prompts: every line is empty; expected one JSON object a line")
    return examples


def _example(text: str, where: str, tokenizer: Tokenizer, prompt_key: str, answer_key: str,
             longest: int | None) -> Example:
    try:
        row = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise UsageError(f"{where} is not valid JSON: {error}") from None
    if not isinstance(row, dict):
        raise UsageError(f"{where} is {type(row).__name__}, expected an object like "
                         f'{{"{prompt_key}": "...", "{answer_key}": "..."}}')
    for option, key in (("--prompt-key", prompt_key), ("--answer-key", answer_key)):
        if key not in row:
            raise UsageError(f"{where} has no column {key!r}{nearest(key, row)}; it has {', '.join(map(repr, row))}: "
                             f"mend the file or give {option}")
    prompt, answer = row[prompt_key], row[answer_key]
    if isinstance(prompt, str):
        tokens = tokenizer.encode(prompt)
    elif isinstance(prompt, list) and all(isinstance(turn, dict) and {"role", "content"} <= turn.keys()
                                          for turn in prompt):
        tokens = tokenizer.encode_chat(prompt)
    else:
        raise UsageError(f"{where}: {prompt_key} is {type(prompt).__name__}, expected a text or a list of chat "
                         'messages {"role": ..., "content": ...}')
    if not isinstance(answer, str | int | float) or isinstance(answer, bool):
        raise UsageError(f"{where}: {answer_key} is {type(answer).__name__}, expected a text or a number")
    if not tokens:
        raise UsageError(f"{where}: the prompt is empty")
    if longest is not None and len(tokens) > longest:
        raise UsageError(f"{where}: the prompt has {len(tokens)} tokens, but the model's context leaves {longest} "
                         "beside the response: shorten it or lower --max-response-len")
    return Example(tuple(tokens), str(answer))


class PromptStream:
    """An endless stream over the examples: each epoch in its own order, fixed by (seed, epoch) alone."""

    def __init__(self, examples: list[Example], seed: int) -> None:
        self.examples = examples
        self.seed = seed
        self._order: dict[int, list[int]] = {}  # of the last epochs that were asked for

    def batch(self, step: int, n: int) -> tuple[list[Prompt], list[str]]:
        """The n prompts of a step and their answers. A prompt's uid is its place in the stream, so none repeats."""
        places = range(step * n, (step + 1) * n)
        chosen = [self._at(place) for place in places]
        prompts = [Prompt(place, example.tokens) for place, example in zip(places, chosen, strict=True)]
        return prompts, [example.answer for example in chosen]

    def _at(self, place: int) -> Example:
        epoch, index = divmod(place, len(self.examples))
        if epoch not in self._order:
            if len(self._order) > 1:
                self._order.clear()
            self._order[epoch] = self._shuffle(epoch)
        return self.examples[self._order[epoch][index]]

    def _shuffle(self, epoch: int) -> list[int]:
        """Sorted by a hash, not drawn from a generator: the order outlives changes of any library's generator."""

        def key(index: int) -> bytes:
            return hashlib.blake2b(f"{self.seed}/{epoch}/{index}".encode(), digest_size=16).digest()

        return sorted(range(len(self.examples)), key=key)
