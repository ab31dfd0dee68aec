"""Write a GGUF of Qwen3-30B-A3B's shapes with random weights, whole or cut: the file that speed is measured on.

    python benchmarks/make_moe.py moe.gguf [--layers 48] [--experts 128] [--vocab 151936] [--seed 1] [--force]

Nothing is downloaded. The types are those that `llama-quantize` gives a model of 128 experts as Q4_K_M. Blocks are
random bits under scales that give zero mean and a standard deviation of 1/sqrt(inputs), so that activations stay of
the size of a real model's; norms are 1. The same arguments give the same bytes, whatever numpy's version, and a
tensor's bytes depend on the seed, its name and its shape alone. The vocabulary is bytes, a few merges and padding.
"""

from __future__ import annotations

import kernels  # noqa: F401 - before numpy: it sets one BLAS thread, as in every real run

# isort: split
import argparse
import math
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, LlamaFileType, TokenType
from numpy.typing import NDArray

from backbone.terminal import ProgressLine
from backbone.tokenizer.bpe import byte_of_character
from kernels.formats import FORMATS, GGMLType, row_bytes

HIDDEN, EXPERT_WIDTH, CHOSEN = 2048, 768, 8
HEADS, KV_HEADS, HEAD = 32, 4, 128
MERGES = ("Ġ t", "h e", "i n", "Ġ a", "Ġt he", "o n", "e r", "Ġ s", "r e", "a n")
END = "<|endoftext|>"
FEWEST_TOKENS = 256 + len(MERGES) + 1
CHUNK_BLOCKS = 1 << 15  #: blocks made at a time: 4.7 MB of Q4_K
SPARE = 64 << 20  #: bytes that are left free on the disk

U8 = NDArray[np.uint8]


class CannotMake(Exception):
    """One line for the user."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What can be cut; all else is the model's."""

    layers: int = 48
    experts: int = 128
    vocab: int = 151936


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor to write. `dims` in GGUF order, inputs first; `std` 0 means that every value is 1."""

    name: str
    type: GGMLType
    dims: tuple[int, ...]
    std: float

    @property
    def nbytes(self) -> int:
        return math.prod(self.dims[1:]) * row_bytes(self.type, self.dims[0])


def more_bits(layer: int, layers: int) -> bool:
    """Whether Q4_K_M gives a layer's values and down projections more bits: the ends, and each third between them."""
    eighth = layers // 8
    return layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2


def tensors(shape: Shape) -> Iterator[Tensor]:
    """Every tensor, in the order of the file."""

    def random(name: str, kind: GGMLType, inputs: int, *outputs: int) -> Tensor:
        return Tensor(name + ".weight", kind, (inputs, *outputs), 1 / math.sqrt(inputs))

    def norm(name: str, width: int) -> Tensor:
        return Tensor(name + ".weight", GGMLType.F32, (width,), 0)

    Q4, Q6 = GGMLType.Q4_K, GGMLType.Q6_K
    # A row of the embedding is looked up, not summed over: of size 1, so that tokens differ behind the first layers.
    yield Tensor("token_embd.weight", Q4, (HIDDEN, shape.vocab), 1)
    for i in range(shape.layers):
        at, more = f"blk.{i}.", Q6 if more_bits(i, shape.layers) else Q4
        yield norm(at + "attn_norm", HIDDEN)
        yield random(at + "attn_q", Q4, HIDDEN, HEADS * HEAD)
        yield random(at + "attn_k", Q4, HIDDEN, KV_HEADS * HEAD)
        yield random(at + "attn_v", more, HIDDEN, KV_HEADS * HEAD)
        yield norm(at + "attn_q_norm", HEAD)
        yield norm(at + "attn_k_norm", HEAD)
        yield random(at + "attn_output", Q4, HEADS * HEAD, HIDDEN)
        yield norm(at + "ffn_norm", HIDDEN)
        yield random(at + "ffn_gate_inp", GGMLType.F32, HIDDEN, shape.experts)
        yield random(at + "ffn_gate_exps", Q4, HIDDEN, EXPERT_WIDTH, shape.experts)
        yield random(at + "ffn_up_exps", Q4, HIDDEN, EXPERT_WIDTH, shape.experts)
        yield random(at + "ffn_down_exps", more, EXPERT_WIDTH, HIDDEN, shape.experts)
    yield norm("output_norm", HIDDEN)
    yield random("output", Q6, HIDDEN, shape.vocab)


def _vary(halves: NDArray[np.uint16], value: float) -> None:
    """Random F16 in place, some 64 steps (at most 6 %) above or below `value`; 7 bits stay as drawn."""
    halves &= 0x7F
    halves += np.uint16(int(np.float16(value).view(np.uint16)) - 64)


def _q4_k(blocks: U8, std: float) -> None:
    """Scales and minima of 32 to 63, drawn apart: value = d * (scale * q - 7.5 * minimum), zero on average."""
    scale_square = np.mean(np.arange(32.0, 64.0) ** 2)
    quant_variance, mean_variance = (16**2 - 1) / 12, 7.5**2 * 2 * (32**2 - 1) / 12
    d = std / math.sqrt(scale_square * quant_variance + mean_variance)
    halves = blocks.view(np.uint16)
    _vary(halves[:, 0:1], d)
    _vary(halves[:, 1:2], 7.5 * d)
    # The top bits of the sixteen 6-bit numbers: bits 5 and 7 of the first eight bytes.
    halves[:, 2:6] |= 0xA0A0


def _q6_k(blocks: U8, std: float) -> None:
    """Scales of -32 to 31: value = d * scale * (q - 32)."""
    scale_square, quant_square = np.mean(np.arange(-32.0, 32.0) ** 2), np.mean(np.arange(-32.0, 32.0) ** 2)
    _vary(blocks.view(np.uint16)[:, 104:105], std / math.sqrt(scale_square * quant_square))
    scales = blocks[:, 192:208].view(np.int8)
    scales >>= 2


def _f32(blocks: U8, std: float) -> None:
    """Uniform, from 24 random bits a value."""
    if not std:
        blocks.view(np.float32)[:] = 1
        return
    values = (blocks.view(np.uint32) >> 8).astype(np.float32)
    values -= np.float32(2**23 - 0.5)
    values *= np.float32(std * math.sqrt(12) / 2**24)
    blocks.view(np.float32)[:] = values


SHAPERS: dict[GGMLType, Callable[[U8, float], None]] = {
    GGMLType.Q4_K: _q4_k,
    GGMLType.Q6_K: _q6_k,
    GGMLType.F32: _f32,
}


def contents(tensor: Tensor, seed: int) -> Iterator[U8]:
    """The tensor's bytes, a few MB at a time."""
    size = FORMATS[tensor.type].nbytes
    stream = np.random.PCG64(np.random.SeedSequence([seed, *tensor.name.encode()]))
    left = tensor.nbytes // size
    while left:
        count = min(left, CHUNK_BLOCKS)
        left -= count
        words = stream.random_raw(-(-count * size // 8))
        blocks = words.astype("<u8", copy=False).view(np.uint8)[: count * size].reshape(count, size)
        SHAPERS[tensor.type](blocks, tensor.std)
        yield blocks


def vocabulary(size: int) -> tuple[list[str], list[int]]:
    """Tokens and their types: every byte, the merges' results, the end, padding that no text gives."""
    known = [*byte_of_character(), *(merge.replace(" ", "") for merge in MERGES)]
    pads = [f"[PAD{i}]" for i in range(len(known) + 1, size)]
    types = [TokenType.NORMAL] * len(known) + [TokenType.CONTROL] + [TokenType.UNUSED] * len(pads)
    return [*known, END, *pads], [int(t) for t in types]


def write_header(path: Path, shape: Shape, wanted: Sequence[Tensor], seed: int) -> None:
    """Metadata and the table of tensors; the data is appended behind them."""
    writer = GGUFWriter(path, "qwen3moe")
    writer.add_name(f"Qwen3-30B-A3B's shapes, random, {shape.layers} layers, seed {seed}")
    writer.add_file_type(LlamaFileType.MOSTLY_Q4_K_M)
    writer.add_quantization_version(2)
    writer.add_block_count(shape.layers)
    writer.add_context_length(40960)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(6144)
    writer.add_expert_feed_forward_length(EXPERT_WIDTH)
    writer.add_expert_count(shape.experts)
    writer.add_expert_used_count(CHOSEN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD)
    writer.add_value_length(HEAD)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    tokens, types = vocabulary(shape.vocab)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(list(MERGES))
    writer.add_eos_token_id(tokens.index(END))
    writer.add_add_bos_token(False)
    for tensor in wanted:
        # With a dtype that is not bytes, the dimensions are taken as values of whatever type.
        kind = GGMLQuantizationType(int(tensor.type))
        writer.add_tensor_info(tensor.name, tensor.dims[::-1], np.dtype(np.float32), tensor.nbytes, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()


def _pad(file: BinaryIO, alignment: int = 32) -> None:
    file.write(bytes(-file.tell() % alignment))


def make(path: Path, shape: Shape, seed: int, progress: Callable[[int, int], None] = lambda done, total: None) -> int:
    """Write the file, and only when it is whole give it its name. Bytes written."""
    wanted = list(tensors(shape))
    total, done = sum(tensor.nbytes for tensor in wanted), 0
    part = path.with_name(path.name + ".part")
    _enough_room(path, total)
    try:
        write_header(part, shape, wanted, seed)
        with part.open("ab") as file:
            for tensor in wanted:
                _pad(file)
                for chunk in contents(tensor, seed):
                    file.write(chunk.data)
                    done += chunk.nbytes
                    progress(done, total)
            _pad(file)
            size = file.tell()
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    return size


def _enough_room(path: Path, size: int) -> None:
    free = shutil.disk_usage(path.parent).free
    if free < size + SPARE:
        raise CannotMake(
            f"{path}: needs {size / 1e9:.2f} GB and {SPARE / 1e9:.2f} to spare, and the disk has {free / 1e9:.2f} "
            "free; name another folder, or take fewer --layers"
        )


def _arguments() -> argparse.Namespace:
    parser, whole = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]), Shape()
    parser.add_argument("path", type=Path, help="the file to write")
    parser.add_argument("--layers", type=int, default=whole.layers)
    parser.add_argument("--experts", type=int, default=whole.experts, help=f"at least {CHOSEN}: so many are used")
    parser.add_argument("--vocab", type=int, default=whole.vocab, help=f"tokens, at least {FEWEST_TOKENS}")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--force", action="store_true", help="overwrite a file that exists")
    args = parser.parse_args()
    for name, least in (("layers", 1), ("experts", CHOSEN), ("vocab", FEWEST_TOKENS), ("seed", 0)):
        if getattr(args, name) < least:
            parser.error(f"--{name} {getattr(args, name)}: at least {least}")
    return args


def main() -> int:
    args = _arguments()
    shape, line = Shape(args.layers, args.experts, args.vocab), ProgressLine(sys.stderr)
    shown = 0.0

    def progress(done: int, total: int) -> None:
        nonlocal shown
        if time.monotonic() - shown > 0.2 or done == total:
            shown = time.monotonic()
            line.show(f"{args.path}: MB", done // 1_000_000, total // 1_000_000)

    started = time.monotonic()
    try:
        if args.path.exists() and not args.force:
            raise CannotMake(f"{args.path}: exists; --force overwrites it")
        if not args.path.parent.is_dir():
            raise CannotMake(f"{args.path.parent}: no such folder")
        size = make(args.path, shape, args.seed, progress)
    except CannotMake as error:
        print(f"make_moe: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"make_moe: {args.path}: {error.strerror or error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    finally:
        line.clear()
    seconds = time.monotonic() - started
    print(f"{args.path}: {size:,} bytes, {size / seconds / 1e6:.0f} MB/s", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
