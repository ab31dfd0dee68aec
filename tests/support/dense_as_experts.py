#!/usr/bin/env python3
"""Write a dense GGUF of architecture `llama` again as a Mixtral-style MoE that computes the same function.

    python dense_as_experts.py SmolLM2-135M-Instruct.Q4_1.gguf smol-experts.gguf [--experts 8]

Each feed-forward is cut into N slices of its hidden width; a slice is an expert, every expert is used for every token,
and the router's weights are zero, so that each expert's weight is exactly 1/N. `ffn_down` is multiplied by N (a power of
two: exact in every scale that is stored), so the sum of the experts is the dense result up to the order of additions.
No weight is rounded again: quantised blocks are moved as they are. What it gives is a model with real language, a real
vocabulary and a chat template whose experts really do the work. Needs numpy and the `gguf` package.
"""

import argparse

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter

# Where a block keeps its F16 scales: byte offsets within the block.
SCALES = {
    "Q8_0": (0,),
    "Q4_0": (0,),
    "Q5_0": (0,),
    "Q4_1": (0, 2),
    "Q5_1": (0, 2),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
}


def multiplied(rows: np.ndarray, kind: GGMLQuantizationType, factor: int) -> np.ndarray:
    """Rows [out, bytes] (or values, for F32 and F16) with every value multiplied by `factor`, a power of two."""
    if kind.name in ("F32", "F16"):
        return rows * rows.dtype.type(factor)
    _, size = GGML_QUANT_SIZES[kind]
    blocks = np.array(rows, dtype=np.uint8).reshape(-1, size)
    for at in SCALES[kind.name]:
        scale = blocks[:, at : at + 2].copy().view(np.float16) * np.float16(factor)
        if not np.isfinite(scale).all():
            raise SystemExit(f"a scale times {factor} does not fit F16")
        blocks[:, at : at + 2] = scale.view(np.uint8)
    return blocks.reshape(rows.shape)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("dense")
    parser.add_argument("out")
    parser.add_argument("--experts", type=int, default=8)
    args = parser.parse_args()
    n = args.experts
    if n < 2 or n & (n - 1):
        raise SystemExit("--experts must be a power of two, 2 or more")

    reader = GGUFReader(args.dense)
    arch = reader.fields["general.architecture"].contents()
    if arch != "llama":
        raise SystemExit(f"architecture {arch!r}: only 'llama' has a Mixtral form that stays exact")
    width = int(reader.fields[f"{arch}.feed_forward_length"].contents())
    writer = GGUFWriter(args.out, arch)
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key == "general.architecture":
            continue
        kinds = field.types
        value = field.contents()
        if key == f"{arch}.feed_forward_length":
            value = width // n
        writer.add_key_value(key, value, kinds[0], sub_type=kinds[-1] if kinds[0] == GGUFValueType.ARRAY else None)
    writer.add_expert_count(n)
    writer.add_expert_used_count(n)

    def add(name: str, data: np.ndarray, kind: GGMLQuantizationType) -> None:
        writer.add_tensor(name, np.ascontiguousarray(data), raw_dtype=None if kind.name in ("F32", "F16") else kind)

    for tensor in reader.tensors:
        name, kind, data = tensor.name, tensor.tensor_type, tensor.data
        _, _, part = name.partition("blk.")[2].partition(".")
        if part in ("ffn_gate.weight", "ffn_up.weight"):  # [width, embd]: rows are hidden units
            stem = name.replace(".weight", "_exps.weight")
            add(stem, data.reshape(n, width // n, *data.shape[1:]), kind)
        elif part == "ffn_down.weight":  # [embd, width]: columns are hidden units
            block, _ = GGML_QUANT_SIZES[kind]
            if (width // n) % block:
                raise SystemExit(f"{name}: {width} / {n} is no multiple of {kind.name}'s block of {block}")
            columns = data.shape[1] // n
            cut = multiplied(data, kind, n).reshape(data.shape[0], n, columns).transpose(1, 0, 2)
            add(name.replace(".weight", "_exps.weight"), cut, kind)
            embd = data.shape[0]
            add(name.replace("ffn_down", "ffn_gate_inp"), np.zeros((n, embd), np.float32), GGMLQuantizationType.F32)
        else:
            add(name, data, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
