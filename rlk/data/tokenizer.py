"""Text to token ids and back: a thin wrapper of transformers' AutoTokenizer, which never goes to the network."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rlk.errors import UsageError

TOKENIZER_FILES = ("tokenizer.json", "vocab.json")  # without either, transformers makes up an empty tokenizer


class Tokenizer:
    """The tokenizer of a checkpoint directory. `len()` is the number of ids that may be sampled or scored."""

    def __init__(self, directory: str | Path) -> None:
        from transformers import AutoTokenizer  # here: it takes seconds, and `rlk --help` must not wait for it

        if not Path(directory).is_dir():
            raise UsageError(f"no tokenizer at {directory}: expected a Hugging Face checkpoint directory")
        if not any((Path(directory) / name).exists() for name in TOKENIZER_FILES):
            raise UsageError(f"{directory} has no tokenizer, expected {' or '.join(TOKENIZER_FILES)}: copy the "
                             "model's tokenizer there")
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(str(directory), local_files_only=True)
        except (OSError, ValueError, KeyError) as error:
            reason = str(error).strip().partition("\n")[0]
            raise UsageError(f"{directory} has no tokenizer that transformers can load: {reason}") from None
        self._size = len(self._tokenizer)

    def __len__(self) -> int:
        return self._size

    def encode(self, text: str) -> list[int]:
        """The ids of a text, as it stands: no special tokens are added."""
        return self._tokenizer.encode(text, add_special_tokens=False)

    def encode_chat(self, messages: Sequence[dict]) -> list[int]:
        """The ids of chat messages in the checkpoint's chat template, up to where the answer begins."""
        if not self._tokenizer.chat_template:
            raise UsageError("the prompt is a list of messages, but the tokenizer has no chat template: "
                             "give the prompt as text")
        text = self._tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        return self.encode(text)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of ids, special tokens left out."""
        return self._tokenizer.decode([int(token) for token in tokens], skip_special_tokens=True,
                                      clean_up_tokenization_spaces=False)
