"""OpenCL devices by PyOpenCL, which brings a loader of its own that finds every installed driver."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from numpy.typing import NDArray

from ..errors import BackendUnavailable
from .driver import Driver, first_error, with_defines
from .interface import DeviceError
from .opencl_devices import (
    NO_BUFFER,
    NO_CONTRACTION,
    NO_DRIVER,
    OUT_OF_MEMORY,
    FoundDevice,
    build_options,
    choose,
    describe,
    error_name,
)


def _pyopencl() -> Any:
    try:
        import pyopencl
    except ImportError as error:
        raise BackendUnavailable(f"opencl: no pyopencl ({error}); pip install 'expertswarm[opencl]'") from None
    return pyopencl


def list_devices() -> list[FoundDevice]:
    """Every device of every platform. BackendUnavailable without PyOpenCL or any driver."""
    cl = _pyopencl()
    found = list[FoundDevice]()
    try:
        for p, platform in enumerate(cl.get_platforms()):
            found += [
                FoundDevice(
                    platform=p,
                    device=d,
                    name=device.name.strip(),
                    platform_name=platform.name.strip(),
                    is_gpu=bool(device.type & cl.device_type.GPU),
                    handle=device,
                )
                for d, device in enumerate(platform.get_devices())
            ]
    except cl.Error as error:
        raise BackendUnavailable(f"opencl: {error.routine} failed: {error_name(error.code)}; {NO_DRIVER}") from None
    return found


def open_device(wanted: str | None = None, environ: Mapping[str, str] = os.environ) -> OpenCLDevice:
    """The device wanted, see `choose`. BackendUnavailable when there is none."""
    return OpenCLDevice(choose(list_devices(), wanted, environ))


class OpenCLDevice(Driver):
    """One device with an in-order queue."""

    def __init__(self, found: FoundDevice) -> None:
        self._cl = _pyopencl()
        device = found.handle
        super().__init__(
            describe(
                found,
                version=device.driver_version,
                memory_bytes=device.global_mem_size,
                largest_buffer=device.max_mem_alloc_size,
                work_group=device.max_work_group_size,
                single_fp=device.single_fp_config,
            )
        )
        self._context = self._call("", self._cl.Context, [device])
        self._queue = self._call("", self._cl.CommandQueue, self._context)

    def _call(self, where: str, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        try:
            return function(*args, **options)
        except self._cl.Error as error:
            raise self._failed(error, where) from None

    def _failed(self, error: Any, where: str) -> DeviceError:
        return self._error(f"{where}{error.routine} failed: {error_name(error.code)}", error.code in OUT_OF_MEMORY)

    def _alloc(self, nbytes: int) -> Any:
        try:
            return self._cl.Buffer(self._context, self._cl.mem_flags.READ_WRITE, nbytes)
        except self._cl.Error as error:
            if error.code in NO_BUFFER:
                raise self._no_memory(nbytes, error_name(error.code)) from None
            raise self._failed(error, "") from None

    def _free(self, handle: Any) -> None:
        handle.release()  # OpenCL keeps it until what was enqueued with it is done

    def _write(self, handle: Any, data: NDArray[Any], offset: int) -> None:
        copy = self._cl.enqueue_copy
        self._call(f"{data.nbytes} bytes to write: ", copy, self._queue, handle, data, dst_offset=offset)

    def _read(self, handle: Any, out: NDArray[Any], offset: int) -> None:
        copy = self._cl.enqueue_copy
        self._call(f"{out.nbytes} bytes to read: ", copy, self._queue, out, handle, src_offset=offset)

    def _build(self, source: str, defines: Mapping[str, str]) -> Any:
        program = self._call("", self._cl.Program, self._context, NO_CONTRACTION + with_defines(source, defines))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of a log that is not empty
                return program.build(build_options(self.info), cache_dir=False)
        except self._cl.Error as error:
            why = first_error(
                str(error).partition(">:\n")[2] or str(error)
            )  # behind "Build on <the device>:" is its log
            raise self._error(f"the source does not compile: {why}") from None

    def _kernel(self, program: Any, name: str) -> tuple[Any, int | None]:
        kernel = self._call(f"{name}: ", self._cl.Kernel, program, name)
        return kernel, kernel.num_args

    def _launch(self, name: str, kernel: Any, groups: tuple[int, int], items: int, args: list[Any]) -> None:
        try:
            kernel(self._queue, (groups[0] * items, groups[1]), (items, 1), *args)
        except self._cl.Error as error:
            raise self._failed(error, f"{name}: ") from None

    def wait(self) -> None:
        """See Device."""
        self._call("", self._queue.finish)
