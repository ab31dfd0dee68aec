"""Errors of the kernels package.

KernelError
├── GGUFError            a model file that cannot be trusted or is not supported
└── BackendUnavailable   a backend that cannot run here, with the reason and the fix
"""


class KernelError(Exception):
    """Base class: the message is one line that names the place and the fix."""


class GGUFError(KernelError):
    """A GGUF file was refused. The message starts with the file's path and names tensor and numbers."""


class BackendUnavailable(KernelError):
    """A backend cannot run on this machine. The message says why and which extra to install."""
