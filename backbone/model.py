"""A model file and its definition, bound: tensors as matrices in place, the executor, the experts to send out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path

import numpy as np

from archdefs import ArchdefError, Definition, Library, Program, bind
from kernels.errors import GGUFError, KernelError
from kernels.formats import GGMLType
from kernels.gguf import GGUFFile, open_gguf
from kernels.interface import Backend, DenseBackend, ExpertWeights, NumericClass, Options
from kernels.matrix import Matrix
from kernels.registry import ACTIVATION_DTYPES, make_backend

from .errors import UsageError
from .executor import Executor
from .experts import LocalExperts

MOST_NAME = 100  #: characters of an architecture's name
_BIASES = ("gate_bias", "up_bias", "down_bias")


class BoundModel:
    """One GGUF, mapped, with the program that its architecture's definition makes of it: all that needs no backend."""

    def __init__(self, gguf: GGUFFile, definition: Definition, program: Program) -> None:
        self.gguf = gguf
        self.definition = definition
        self.program = program

    @property
    def path(self) -> Path:
        """The (first) model file."""
        return self.gguf.path

    @property
    def paths(self) -> tuple[Path, ...]:
        """The model's files."""
        return self.gguf.paths

    @property
    def warnings(self) -> tuple[str, ...]:
        """What an operator should know of the binding. Optional blocks of built-in definitions are no news."""
        told = self.program.warnings
        return told if self.definition.origin != "built in" else tuple(w for w in told if "no step uses" in w)

    @property
    def vocabulary(self) -> int:
        """Logits a row."""
        return self.program.slot_widths[self.program.logits]

    @property
    def trained_context(self) -> int | None:
        """The context that the file declares, in tokens."""
        value = self.gguf.metadata.get(f"{self.gguf.metadata.get('general.architecture')}.context_length")
        return int(value) if isinstance(value, (int, np.integer)) and value > 0 else None

    def matrix(self, name: str) -> Matrix:
        """A tensor as a matrix in place: its first dimension is a row's length, all others count rows."""
        info = self.gguf.tensors[name]
        rows = int(np.prod(info.dims[1:], dtype=np.int64))
        return Matrix.of(info.type, rows, info.dims[0], self.gguf.data(name))

    def expert_matrix(self, name: str, expert: int) -> Matrix:
        """One expert's matrix of a tensor [inputs, outputs, experts]: a contiguous part of the file."""
        info = self.gguf.tensors[name]
        return Matrix.of(info.type, info.dims[1], info.dims[0], self.gguf.expert_data(name, expert))

    def slice_data(self, tensor: str, expert: int) -> memoryview:
        """One expert's bytes of a tensor whose last dimension counts experts."""
        data = self.gguf.data(tensor)
        size = len(data) // self.gguf.tensors[tensor].dims[-1]
        return data.data[expert * size : (expert + 1) * size]

    def release(self, layer: int) -> None:
        """Take a layer's experts out of this process's memory, until they are read again."""
        for tensor in self.expert_tensors[layer].values():
            self.gguf.release(tensor)

    def slice_shape(self, tensor: str) -> tuple[int, int]:
        """Rows and columns of one expert's part of a tensor; a bias is one row."""
        dims = self.gguf.tensors[tensor].dims
        return (dims[1], dims[0]) if len(dims) == 3 else (1, dims[0])

    def slice_type(self, tensor: str) -> GGMLType:
        """The quant type of a tensor."""
        return self.gguf.tensors[tensor].type

    def expert_width(self, layer: int) -> int:
        """Values in an expert's output row."""
        return self.gguf.tensors[self.expert_tensors[layer]["down"]].dims[1]

    @cached_property
    def expert_tensors(self) -> Mapping[int, Mapping[str, str]]:
        """For each layer with experts: part (gate, up, down, biases) to the tensor's name."""
        steps = (step for step in self.program.steps if step.op == "experts")
        return {step.layer: step.tensors for step in steps if step.layer is not None}

    @cached_property
    def _activations(self) -> Mapping[int, str]:
        steps = (step for step in self.program.steps if step.op == "experts")
        return {step.layer: str(step.constants["activation"]) for step in steps if step.layer is not None}

    def activation(self, layer: int) -> str:
        """The word of a layer's experts."""
        return self._activations[layer]

    def expert_count(self, layer: int) -> int:
        """Experts of a layer."""
        return self.gguf.tensors[self.expert_tensors[layer]["gate"]].dims[2]

    def expert(self, layer: int, expert: int) -> ExpertWeights:
        """One expert's weights, in place in the mapped file."""
        names = self.expert_tensors[layer]
        biases = {part: self.matrix(names[part]).take(np.array([expert]))[0] for part in _BIASES if part in names}
        return ExpertWeights(
            gate=self.expert_matrix(names["gate"], expert),
            up=self.expert_matrix(names["up"], expert),
            down=self.expert_matrix(names["down"], expert),
            activation=self.activation(layer),
            **biases,
        )


class Model(BoundModel):
    """A bound model on the backend that runs it."""

    def __init__(self, gguf: GGUFFile, definition: Definition, program: Program, backend: DenseBackend) -> None:
        super().__init__(gguf, definition, program)
        self.backend = backend
        self.executor = Executor(program, backend, self.matrix, self.local_experts.bank)

    @property
    def numeric_class(self) -> NumericClass:
        """What the backbone's own bits depend on."""
        return self.backend.numeric_class

    @property
    def judges(self) -> Iterator[Backend]:
        """What experts can be computed with to check others: the backbone's own, and what its C code has beside it."""
        yield self.backend
        if self.backend.name == "native":
            for activations in ACTIVATION_DTYPES:
                if activations != self.backend.numeric_class.activations:
                    yield make_backend("native", Options(threads=self.backend.threads, activations=activations))

    @cached_property
    def local_experts(self) -> LocalExperts:
        """All experts computed in this process by the backbone's own backend."""
        return LocalExperts(
            self.backend, lambda layer: {e: self.expert(layer, e) for e in range(self.expert_count(layer))}
        )


def load_model(path: Path, library: Library, backend: DenseBackend) -> Model:
    """Open, check and bind a model. UsageError says what is wrong with the file or the definition."""
    bound = bind_model(path, library)
    try:
        return Model(bound.gguf, bound.definition, bound.program, backend)
    except KernelError as error:
        raise UsageError(f"{path}: {error}") from None


def bind_model(path: Path, library: Library) -> BoundModel:
    """The same without a backend: headers and metadata are read, weights are not."""
    try:
        gguf = open_gguf(path)
    except GGUFError as error:
        raise UsageError(str(error)) from None
    architecture = gguf.metadata.get("general.architecture")
    if not isinstance(architecture, str):
        raise UsageError(f"{path}: the metadata has no 'general.architecture'; this is no language model")
    if len(architecture) > MOST_NAME:
        raise UsageError(
            f"{path}: 'general.architecture' has {len(architecture)} characters; this is no language model"
        )
    if not gguf.tensors:
        raise UsageError(f"{path}: a vocabulary without tensors; it can tokenize, not generate")
    dims = {name: info.dims for name, info in gguf.tensors.items()}
    try:
        definition = library.get(architecture)
        program = bind(definition, gguf.metadata, dims, str(path))
    except ArchdefError as error:
        raise UsageError(f"{path}: cannot be run as {architecture!r}\n{error}") from None
    _same_vocabulary(program, dims, path)
    return BoundModel(gguf, definition, program)


def _same_vocabulary(program: Program, dims: Mapping[str, tuple[int, ...]], path: Path) -> None:
    """Every token that the head can choose has an embedding, and every embedding can be chosen."""
    logits = program.slot_widths[program.logits]
    for step in program.prologue:
        if step.op == "embed" and dims[step.tensors["weight"]][1] != logits:
            name = step.tensors["weight"]
            raise UsageError(f"{path}: {name} has {dims[name][1]} tokens and the head {logits}; the file is damaged")
