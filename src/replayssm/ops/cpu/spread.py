"""Calls spread over threads: the loop over shares calls its kernel by address.

The compiler works several times through a loop that is spread over threads, and through everything
that it calls. Called by address, a kernel is compiled once, and threads run the very code that a
small call runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import numba
from numba.core import types
from numba.extending import intrinsic

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Kernel = Callable[..., None]

_addresses: dict[tuple[object, ...], int] = {}


def launch(
    kernel: Kernel, loop: Kernel, args: tuple[object, ...], base: int, size: int, shares: int
) -> None:
    """Run a kernel's shares: one in the calling thread, several spread over threads.

    Args:
        kernel: Compiled function of ``(*args, base, share, shares)``.
        loop: Compiled function of ``(address, *args, base, size, shares)``: calls the kernel at
            that address for every share, with scratch from ``base + share * size`` on.
        args: What every share gets.
        base: Address of the scratch.
        size: Bytes of scratch of one share.
        shares: How many.
    """
    if shares == 1:
        kernel(*args, base, 0, 1)
    else:
        loop(_address_of(kernel, (*args, base, 0, 1)), *args, base, size, shares)


def _address_of(kernel: Any, args: tuple[object, ...]) -> int:  # noqa: ANN401
    # Python's types stand for the compiled ones: integers, and arrays of one dtype and layout
    key = (kernel, *map(type, args))
    if key not in _addresses:
        made = kernel.get_compile_result(types.void(*map(numba.typeof, args)))
        _addresses[key] = made.library.get_pointer_to_function(made.fndesc.llvm_func_name)
    return _addresses[key]


def _call_at(_: object, address: types.Type, args: types.Type) -> tuple[Any, Callable[..., Any]]:
    def generate(context: Any, builder: Any, signature: Any, values: Sequence[Any]) -> Any:  # noqa: ANN401
        kinds = signature.args[1].types
        parts = [builder.extract_value(values[1], n) for n in range(len(kinds))]
        kind = context.call_conv.get_function_type(types.void, kinds)
        kernel = builder.inttoptr(values[0], kind.as_pointer())
        # kernels raise nothing: there is no status to look at
        context.call_conv.call_function(builder, kernel, types.void, kinds, parts)
        return context.get_dummy_value()

    return types.void(address, args), generate


# call the kernel at an address with a tuple of arguments, of the types that it is compiled for
call_at = cast("Callable[[int, tuple[object, ...]], None]", intrinsic(_call_at))
