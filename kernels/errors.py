"""Errors of the kernels package.

KernelError
├── GGUFError            a model file that cannot be trusted or is not supported
├── BackendUnavailable   a backend that cannot run here, with the reason and the fix
└── NotFinite            experts' rows that are not finite, with the layer
"""


class KernelError(Exception):
    """Base class: the message is one line that names the place and the fix."""


class GGUFError(KernelError):
    """A GGUF file was refused. The message starts with the file's path and names tensor and numbers."""


class BackendUnavailable(KernelError):
    """A backend cannot run on this machine. The message says why and which extra to install."""


class NotFinite(KernelError):
    """Experts of `layer` gave rows that are not finite."""

    def __init__(self, layer: int) -> None:
        super().__init__(f"layer {layer}: expert rows are not finite")
        self.layer = layer
