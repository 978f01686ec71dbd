"""Where the elements of each parameter lie, as the optimizer sees it.

`Mars` works on flat tensors. A `Fragment` says which elements of which parameter lie at which place of
one. `Sharding` is what differs between one device and ZeRO: whose sums are added up, and how a whole
matrix comes together. `WholeTensors` is the one-device case; `mars_ds.zero.binding` gives the other.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from mars_ds.optim.routing import matrix_shape


@dataclass(frozen=True, slots=True)
class Fragment:
    """Elements [start, start + numel) of parameter `name` at [offset, offset + numel) of a flat tensor.

    Attributes:
        name: Dotted parameter name.
        shape: True shape of the whole parameter.
        start: First element within the flattened parameter.
        numel: Number of elements, at least 1.
        offset: Position in this rank's flat tensor.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    numel: int
    offset: int

    @property
    def stop(self) -> int:
        """One past the last element within the flattened parameter."""
        return self.start + self.numel

    def view(self, flat: Tensor) -> Tensor:
        """This fragment's elements of a flat tensor laid out like the shard."""
        return flat.narrow(0, self.offset, self.numel)


class Sharding(Protocol):
    """What the optimizer needs to know about the placement of elements on ranks."""

    def fragments(self, tensor: Tensor) -> Sequence[Fragment]:
        """Fragments in `tensor`, in ascending offset; padding belongs to none."""

    def sum_over_ranks(self, tensors: Sequence[Tensor], sums: Tensor) -> Tensor:
        """Adds per-parameter partial sums over the ranks that share the step of `tensors`."""

    def gather_matrices(self, tensors: Sequence[Tensor], pieces: dict[str, Tensor]) -> dict[str, Tensor]:
        """Sends fragments to the owner of each matrix.

        Args:
            tensors: The flat tensors of one param group in this `step()` call.
            pieces: Local fragment of each matrix of the call, flat, in the wire dtype.

        Returns:
            The (rows, columns) matrices that this rank owns, by name.
        """

    def scatter_updates(self, tensors: Sequence[Tensor], updates: dict[str, Tensor]) -> dict[str, Tensor]:
        """Returns the updates of owned matrices to the holders: the local fragments, flat, by name."""


class WholeTensors:
    """Sharding of one device: each tensor is one whole parameter and nothing moves."""

    def __init__(self, names: dict[Tensor, str]) -> None:
        self._fragments = {
            tensor: (Fragment(name, tuple(tensor.shape), 0, tensor.numel(), 0),) if tensor.numel() else ()
            for tensor, name in names.items()
        }

    def fragments(self, tensor: Tensor) -> Sequence[Fragment]:
        return self._fragments[tensor]

    def sum_over_ranks(self, tensors: Sequence[Tensor], sums: Tensor) -> Tensor:
        return sums

    def gather_matrices(self, tensors: Sequence[Tensor], pieces: dict[str, Tensor]) -> dict[str, Tensor]:
        shapes = {f.name: f.shape for t in tensors for f in self._fragments[t]}
        return {name: piece.view(matrix_shape(shapes[name])) for name, piece in pieces.items()}

    def scatter_updates(self, tensors: Sequence[Tensor], updates: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: update.reshape(-1) for name, update in updates.items()}
