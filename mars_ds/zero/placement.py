"""Which rank orthogonalizes which matrix: a pure function of the layout, the same on every rank.

Each matrix gets one owner among its holders, so Newton-Schulz runs once in all. Owners are chosen to
balance Newton-Schulz FLOPs first and bytes moved second: the best plan of a small portfolio.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from mars_ds.optim.newton_schulz import newton_schulz_flops
from mars_ds.optim.routing import matrix_shape
from mars_ds.zero.layout import ShardLayout


@dataclass(frozen=True)
class Piece:
    """Elements [start, stop) of a flattened matrix on `rank`."""

    rank: int
    start: int
    stop: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.stop - self.start


@dataclass(frozen=True)
class Message:
    """Elements of one matrix that travel from one rank to another."""

    source: int
    destination: int
    name: str
    piece: Piece


@dataclass(frozen=True)
class MatrixPlacement:
    """One matrix, where its pieces lie (ascending, at most one a rank), and who orthogonalizes it."""

    name: str
    rows: int
    columns: int
    pieces: tuple[Piece, ...]
    owner: int

    @property
    def moves(self) -> bool:
        """True when some element is not at the owner already."""
        return any(piece.rank != self.owner for piece in self.pieces)


@dataclass(frozen=True)
class ExchangePlan:
    """Owners of all matrices of one call, with the costs that follow from them.

    Attributes:
        world_size: Ranks of the process group.
        matrices: In the order of the call.
        replicated: Stage 0: nothing goes in, the owner returns its update to everyone.
        flops: Newton-Schulz FLOPs per rank.
    """

    world_size: int
    matrices: tuple[MatrixPlacement, ...]
    replicated: bool
    flops: tuple[int, ...]

    @property
    def needs_exchange(self) -> bool:
        """False when every matrix already lies whole where it is needed: no collective runs."""
        return self.world_size > 1 and (self.replicated or any(m.moves for m in self.matrices))

    def inbound(self) -> list["Message"]:
        """What holders send to owners."""
        if self.replicated:
            return []
        return [Message(p.rank, m.owner, m.name, p) for m in self.matrices for p in m.pieces if p.rank != m.owner]

    def outbound(self) -> list["Message"]:
        """What owners send back: to each holder its elements, to everyone the whole at stage 0."""
        if not self.replicated:
            return [Message(m.destination, m.source, m.name, m.piece) for m in self.inbound()]
        return [
            Message(m.owner, rank, m.name, Piece(rank, 0, m.rows * m.columns))
            for m in self.matrices
            for rank in range(self.world_size)
            if rank != m.owner
        ]

    def exchanged_elements(self) -> int:
        """Elements that all ranks together send in one step, both ways; times 2 bytes in bf16."""
        return sum(m.piece.numel for m in self.inbound() + self.outbound())

    def imbalance(self) -> float:
        """FLOPs of the busiest rank over the even share; 1.0 is perfect."""
        total = sum(self.flops)
        return max(self.flops) * self.world_size / total if total else 1.0

    def digest(self) -> str:
        """SHA-256 of the plan; ranks compare it before the first exchange."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()


def plan_exchange(
    layout: ShardLayout, call: int, names: Sequence[str], *, steps: int = 5, form: str = "standard"
) -> ExchangePlan:
    """Chooses owners for the matrices of one call.

    Args:
        layout: Shards of all ranks.
        call: Call id.
        names: Names of the parameters under the orthogonal rule.
        steps: Newton-Schulz iterations.
        form: Newton-Schulz form, for the cost.

    Returns:
        The plan with the lowest (busiest rank, elements moved) of the portfolio.
    """
    wanted = set(names)
    open_matrices: list[_Open] = []
    for name, held in layout.holders(call).items():
        if name in wanted:
            rows, columns = matrix_shape(held[0][1].shape)
            pieces = tuple(Piece(rank, f.start, f.stop) for rank, f in held)
            cost = newton_schulz_flops(rows, columns, steps, form)
            open_matrices.append(_Open(name, rows, columns, pieces, cost))
    orders: list[Callable[[_Open], tuple[int, ...]]] = [
        lambda m: (len(m.holders()), -m.cost),  # forced choices first, then longest first
        lambda m: (-m.cost,),
        lambda m: (0,),  # natural order: often perfect when layers divide the ranks
    ]
    best: tuple[tuple[int, int], list[int]] | None = None
    for order in orders:
        owners = _assign(open_matrices, order, layout.world_size)
        owners = _improve(open_matrices, owners, layout.world_size)
        score = _score(open_matrices, owners, layout)
        if best is None or score < best[0]:
            best = (score, owners)
    owners = best[1] if best else []
    loads = _loads(open_matrices, owners, layout.world_size)
    return ExchangePlan(
        layout.world_size,
        tuple(
            MatrixPlacement(m.name, m.rows, m.columns, m.pieces, owner)
            for m, owner in zip(open_matrices, owners, strict=True)
        ),
        layout.replicated,
        tuple(loads),
    )


@dataclass(frozen=True)
class _Open:
    """A matrix without an owner yet."""

    name: str
    rows: int
    columns: int
    pieces: tuple[Piece, ...]
    cost: int

    def holders(self) -> dict[int, int]:
        """Rank -> elements it holds."""
        held: dict[int, int] = {}
        for piece in self.pieces:
            held[piece.rank] = held.get(piece.rank, 0) + piece.numel
        return held


def _assign(matrices: Sequence[_Open], order: Callable[[_Open], tuple[int, ...]], world_size: int) -> list[int]:
    """Greedy: each matrix to its least loaded holder, ties to the largest piece, then the lowest rank."""
    loads, owners = [0] * world_size, [0] * len(matrices)
    for i in sorted(range(len(matrices)), key=lambda i: (*order(matrices[i]), i)):
        held = matrices[i].holders()
        owner = min(held, key=lambda rank: (loads[rank], -held[rank], rank))
        owners[i] = owner
        loads[owner] += matrices[i].cost
    return owners


def _improve(matrices: Sequence[_Open], owners: list[int], world_size: int) -> list[int]:
    """Moves matrices off the busiest rank while that lowers the maximum of the two loads involved."""
    owners, loads = list(owners), _loads(matrices, owners, world_size)
    for _ in range(4 * len(matrices)):
        busiest = max(range(world_size), key=lambda rank: (loads[rank], -rank))
        moves = [
            (max(loads[busiest] - m.cost, loads[rank] + m.cost), i, rank)
            for i, m in enumerate(matrices)
            if owners[i] == busiest
            for rank in m.holders()
            if rank != busiest
        ]
        if not moves or min(moves)[0] >= loads[busiest]:
            return owners
        _, i, rank = min(moves)
        loads[busiest] -= matrices[i].cost
        loads[rank] += matrices[i].cost
        owners[i] = rank
    return owners


def _loads(matrices: Sequence[_Open], owners: Sequence[int], world_size: int) -> list[int]:
    loads = [0] * world_size
    for matrix, owner in zip(matrices, owners, strict=True):
        loads[owner] += matrix.cost
    return loads


def _score(matrices: Sequence[_Open], owners: Sequence[int], layout: ShardLayout) -> tuple[int, int]:
    busiest = max(_loads(matrices, owners, layout.world_size), default=0)
    moved = sum(p.numel for m, owner in zip(matrices, owners, strict=True) for p in m.pieces if p.rank != owner)
    return busiest, 0 if layout.replicated else moved
