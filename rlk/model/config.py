"""What a checkpoint's config.json says about the model, checked against what this code computes."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from rlk.contract import VOCAB_TILES
from rlk.errors import UsageError

ARCHITECTURE = "Qwen3ForCausalLM"
MOST_HEAD_DIM = 128  # kMaxHeadDim in hipkernels/cpu/attention.h


def serves_head_dim(elements: int) -> bool:
    """Whether attention serves heads of that many elements."""
    return elements % 16 == 0 and 16 <= elements <= MOST_HEAD_DIM


@dataclass(frozen=True)
class ModelConfig:
    """Shape and constants of one dense Qwen3 model (Qwen3 Technical Report, arXiv:2505.09388)."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int  # rows of the checkpoint's embedding, the tokenizer's unused ids included
    max_position: int
    rope_theta: float = 1e6
    rms_norm_eps: float = 1e-6
    tie_embeddings: bool = False
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    pad_token_id: int | None = None

    def __post_init__(self) -> None:
        for name in ("hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim",
                     "vocab_size", "max_position"):
            if type(value := getattr(self, name)) is not int or value < 1:
                raise UsageError(f"config.json gives {name} = {value!r}, expected a whole number from 1: fetch the "
                                 "checkpoint again")
        if not all(type(token) is int and token >= 0 for token in self.eos_token_ids):
            raise UsageError(f"the checkpoint's eos_token_id is {list(self.eos_token_ids)}, expected token ids: mend "
                             "generation_config.json")
        if self.num_heads % self.num_kv_heads:
            raise UsageError(
                f"num_attention_heads is {self.num_heads}, expected a multiple of num_key_value_heads "
                f"({self.num_kv_heads}); the checkpoint's config.json is wrong"
            )
        if not serves_head_dim(self.head_dim):
            raise UsageError(f"head_dim is {self.head_dim}, expected a multiple of 16 up to {MOST_HEAD_DIM}: "
                             "attention serves no other; use another checkpoint")

    @property
    def padded_vocab(self) -> int:
        """vocab_size rounded up to whole log-prob tiles; the rows added are zero."""
        return -(-self.vocab_size // VOCAB_TILES) * VOCAB_TILES

    @classmethod
    def from_pretrained(cls, directory: str | Path) -> ModelConfig:
        """Read config.json, and the EOS ids from generation_config.json when it has any.

        Raises UsageError for a missing or broken file, and for a model this code would compute wrongly.
        """
        directory = Path(directory)
        config = read_json(directory / "config.json")
        generation_file = directory / "generation_config.json"
        generation = read_json(generation_file) if generation_file.exists() else {}
        try:
            return cls.from_dict(config, generation)
        except UsageError as error:
            raise UsageError(f"{directory}: {error}") from None

    @classmethod
    def from_dict(cls, config: dict, generation: dict) -> ModelConfig:
        """The same from the parsed files; `generation` may be empty."""
        _refuse_other_models(config)
        rope = config.get("rope_parameters") or {}  # transformers 5; earlier versions have rope_theta at the top
        eos = generation.get("eos_token_id", config.get("eos_token_id"))
        try:
            return cls(
                hidden_size=config["hidden_size"],
                intermediate_size=config["intermediate_size"],
                num_layers=config["num_hidden_layers"],
                num_heads=config["num_attention_heads"],
                num_kv_heads=config["num_key_value_heads"],
                head_dim=config["head_dim"],
                vocab_size=config["vocab_size"],
                max_position=config["max_position_embeddings"],
                rope_theta=float(rope.get("rope_theta", config.get("rope_theta", 1e6))),
                rms_norm_eps=config["rms_norm_eps"],
                tie_embeddings=config.get("tie_word_embeddings", False),
                eos_token_ids=tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,),
                bos_token_id=config.get("bos_token_id"),
                pad_token_id=config.get("pad_token_id"),
            )
        except KeyError as error:
            raise UsageError(f"config.json lacks {error.args[0]!r}; use a complete {ARCHITECTURE} checkpoint") from None

    def as_hugging_face(self, dtype: str) -> dict:
        """The config.json of an exported checkpoint, as every transformers version since Qwen3 reads it."""
        eos = list(self.eos_token_ids)
        return {
            "architectures": [ARCHITECTURE],
            "model_type": "qwen3",
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab_size,
            "max_position_embeddings": self.max_position,
            "rope_theta": self.rope_theta,
            "rms_norm_eps": self.rms_norm_eps,
            "tie_word_embeddings": self.tie_embeddings,
            "hidden_act": "silu",
            "attention_bias": False,
            "use_sliding_window": False,
            "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
            "bos_token_id": self.bos_token_id,
            "pad_token_id": self.pad_token_id,
            "torch_dtype": dtype,
        }


def read_json(path: Path) -> dict:
    """One JSON object, or UsageError naming the file."""
    try:
        value = json.loads(path.read_text())
    except FileNotFoundError:
        raise UsageError(f"{path} does not exist; expected a Hugging Face checkpoint directory") from None
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read as JSON: {error}; fetch the checkpoint again") from None
    if not isinstance(value, dict):
        raise UsageError(f"{path} holds a JSON {type(value).__name__}, expected an object")
    return value


def _refuse_other_models(config: dict) -> None:
    """Stop for anything that needs arithmetic this model does not do, rather than compute something else."""
    architectures = config.get("architectures") or []
    if config.get("model_type") != "qwen3" or (architectures and ARCHITECTURE not in architectures):
        found = ", ".join(architectures) or config.get("model_type")
        raise UsageError(f"the model is {found}, expected {ARCHITECTURE}: only dense Qwen3 models are served")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    windowed = config.get("use_sliding_window") or "sliding_attention" in (config.get("layer_types") or [])
    for key, got, expected in (
        ("attention_bias", bool(config.get("attention_bias")), False),
        ("use_sliding_window", bool(windowed), False),
        ("rope_type", rope_type, "default"),
        ("hidden_act", config.get("hidden_act", "silu"), "silu"),
        ("num_experts", config.get("num_experts") or 0, 0),
    ):
        if got != expected:
            raise UsageError(f"config.json has {key} = {got!r}, expected {expected!r}: this variant is not served")
