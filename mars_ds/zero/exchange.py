"""Moves fragments of matrices to their owners and the updates back, as an `ExchangePlan` says.

One `all_to_all_single` each way per call, none when no matrix is cut. Messages lie in the buffer in the
plan's order, so both sides compute every offset alone and no metadata travels.
"""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from mars_ds.zero.placement import ExchangePlan, Message


class MatrixExchange:
    """Carries out one `ExchangePlan` on one rank.

    Args:
        plan: Owners and pieces, equal on all ranks.
        group: Process group whose ranks the plan numbers; None is the default group.
        rank: This rank within `group`.
        device: Where collectives and Newton-Schulz run: the accelerator, also when state is offloaded.
        dtype: Wire dtype.
    """

    def __init__(
        self,
        plan: ExchangePlan,
        group: dist.ProcessGroup | None,
        rank: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.plan, self.group, self.rank, self.device, self.dtype = plan, group, rank, device, dtype
        self._starts = {m.name: p.start for m in plan.matrices for p in m.pieces if p.rank == rank}
        self._inbound = _Route(plan.inbound(rank), plan.world_size, rank)
        self._outbound = _Route(plan.outbound(rank), plan.world_size, rank)

    def gather(self, pieces: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Brings the matrices that this rank owns together.

        Args:
            pieces: This rank's elements of each matrix it holds, flat, in the wire dtype.

        Returns:
            Owned matrices by name, (rows, columns), on `device`.
        """
        pieces = {name: piece.to(self.device) for name, piece in pieces.items()}
        # At stage 0 a held piece is the whole matrix, whichever rank's piece the plan names.
        offsets = dict.fromkeys(pieces, 0) if self.plan.replicated else self._starts
        exchanged = self.plan.needs_exchange and not self.plan.replicated
        received = self._exchange(self._inbound, pieces, offsets) if exchanged else {}
        matrices = {}
        for matrix in self.plan.matrices:
            if matrix.owner != self.rank:
                continue
            if self.plan.replicated or not matrix.moves:
                whole = pieces[matrix.name]
            else:
                parts = [
                    pieces[matrix.name] if p.rank == self.rank else received[matrix.name, p.start]
                    for p in matrix.pieces
                ]
                whole = torch.cat(parts)
            matrices[matrix.name] = whole.view(matrix.rows, matrix.columns)
        return matrices

    def scatter(self, updates: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns to each holder its elements of the updates.

        Args:
            updates: Updates of owned matrices by name, (rows, columns), wire dtype.

        Returns:
            This rank's elements of the update of every matrix it holds, flat, by name, on `device`.
        """
        flats = {name: update.reshape(-1) for name, update in updates.items()}
        zeros = dict.fromkeys(flats, 0)
        received = self._exchange(self._outbound, flats, zeros) if self.plan.needs_exchange else {}
        local = {name: part for (name, _), part in received.items()}
        for matrix in self.plan.matrices:
            if matrix.owner == self.rank:
                if self.plan.replicated:
                    local[matrix.name] = flats[matrix.name]
                    continue
                for piece in matrix.pieces:
                    if piece.rank == self.rank:
                        local[matrix.name] = flats[matrix.name][piece.start : piece.stop]
        return local

    def _exchange(
        self, route: "_Route", tensors: Mapping[str, Tensor], offsets: Mapping[str, int]
    ) -> dict[tuple[str, int], Tensor]:
        """Runs one all-to-all, on every rank also when this one has nothing to send or to receive.

        Args:
            route: What this rank sends and expects.
            tensors: Flat sources by name.
            offsets: Element of the matrix at which each source begins.

        Returns:
            What arrived here, by (matrix name, first element).
        """
        parts = [tensors[m.name].narrow(0, m.piece.start - offsets[m.name], m.piece.numel) for m in route.sent]
        outgoing = torch.cat(parts) if parts else torch.empty(0, dtype=self.dtype, device=self.device)
        incoming = torch.empty(sum(route.output_splits), dtype=self.dtype, device=self.device)
        dist.all_to_all_single(incoming, outgoing, route.output_splits, route.input_splits, group=self.group)
        received, at = {}, 0
        for message in route.expected:
            received[message.name, message.piece.start] = incoming.narrow(0, at, message.piece.numel)
            at += message.piece.numel
        return received


class _Route:
    """One direction of the exchange for one rank: messages in buffer order, and the splits of both buffers."""

    def __init__(self, messages: Sequence[Message], world_size: int, rank: int) -> None:
        self.sent = sorted((m for m in messages if m.source == rank), key=lambda m: m.destination)
        self.expected = sorted((m for m in messages if m.destination == rank), key=lambda m: m.source)
        self.input_splits, self.output_splits = [0] * world_size, [0] * world_size
        for message in self.sent:
            self.input_splits[message.destination] += message.piece.numel
        for message in self.expected:
            self.output_splits[message.source] += message.piece.numel
