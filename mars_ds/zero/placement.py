"""Which rank orthogonalizes which matrix: a pure function of the layout, the same on every rank.

Each matrix gets one owner, so Newton-Schulz runs once in all: a holder of some of it at stages 1 and 2,
any rank at stages 0 and 3, where every rank has as much of it as another. Owners are chosen to balance
Newton-Schulz FLOPs over the whole step first and to move few bytes second: the best plan of a small
portfolio. docs/placement.md shows what comes out.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from mars_ds.optim.newton_schulz import newton_schulz_flops
from mars_ds.optim.routing import matrix_shape
from mars_ds.optim.sharding import Fragment
from mars_ds.zero.layout import ShardLayout
from mars_ds.zero.packing import balanced

# Ranks that one chain of moves may touch. Flat shards are a chain of neighbours, so work can be passed along it.
CHAIN = 32


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements [start, stop) of a flattened matrix on `rank`."""

    rank: int
    start: int
    stop: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Message:
    """Elements of one matrix that travel from one rank to another."""

    source: int
    destination: int
    name: str
    piece: Piece


@dataclass(frozen=True)
class MatrixPlacement:
    """One matrix, where its pieces lie (ascending), and who orthogonalizes it.

    At stage 0 the only piece is the whole matrix at its owner, who needs no other rank's copy.
    """

    name: str
    rows: int
    columns: int
    pieces: tuple[Piece, ...]
    owner: int

    @property
    def numel(self) -> int:
        """Elements of the matrix."""
        return self.rows * self.columns

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

    def inbound(self, rank: int | None = None) -> list[Message]:
        """What holders send to owners; with `rank`, only what that rank sends or receives."""
        if self.replicated:
            return []
        return [
            Message(piece.rank, matrix.owner, matrix.name, piece)
            for matrix in self.matrices
            for piece in matrix.pieces
            if piece.rank != matrix.owner and (rank is None or rank in (piece.rank, matrix.owner))
        ]

    def outbound(self, rank: int | None = None) -> list[Message]:
        """What owners send back: to each holder its elements, to everyone the whole at stage 0."""
        if not self.replicated:
            return [Message(m.destination, m.source, m.name, m.piece) for m in self.inbound(rank)]
        return [
            Message(matrix.owner, receiver, matrix.name, Piece(receiver, 0, matrix.numel))
            for matrix in self.matrices
            for receiver in range(self.world_size)
            if receiver != matrix.owner and (rank is None or rank in (receiver, matrix.owner))
        ]

    def sent_elements(self) -> list[int]:
        """Elements that each rank sends in one step, both ways together."""
        sent = [0] * self.world_size
        for matrix in self.matrices:
            if self.replicated:
                sent[matrix.owner] += matrix.numel * (self.world_size - 1)
                continue
            for piece in matrix.pieces:
                if piece.rank != matrix.owner:
                    sent[piece.rank] += piece.numel
                    sent[matrix.owner] += piece.numel
        return sent

    def exchanged_elements(self) -> int:
        """Elements that all ranks together send in one step, both ways."""
        return sum(self.sent_elements())

    def exchanged_bytes(self, itemsize: int = 2) -> int:
        """Bytes that all ranks together send in one step; `itemsize` is that of the wire dtype (bf16: 2)."""
        return itemsize * self.exchanged_elements()

    def sent_bytes(self, itemsize: int = 2) -> list[int]:
        """Bytes that each rank sends in one step, both ways together."""
        return [itemsize * elements for elements in self.sent_elements()]

    def lower_bound_elements(self) -> int:
        """Elements that no exchange with these owners can do without.

        Stages 1 to 3: twice what of each matrix is not at its owner. Stage 0: one copy of each update to
        every other rank.
        """
        if self.replicated:
            return (self.world_size - 1) * sum(matrix.numel for matrix in self.matrices)
        at_owner = sum(p.numel for m in self.matrices for p in m.pieces if p.rank == m.owner)
        return 2 * (sum(matrix.numel for matrix in self.matrices) - at_owner)

    def straddlers(self) -> int:
        """Matrices that lie on more than one rank (none at stage 0)."""
        return sum(len({piece.rank for piece in matrix.pieces}) > 1 for matrix in self.matrices)

    def imbalance(self) -> float:
        """FLOPs of the busiest rank over the even share; 1.0 is perfect."""
        return imbalance(self.flops)

    def digest(self) -> str:
        """SHA-256 of the plan; ranks compare it before the first exchange."""
        hasher = hashlib.sha256(f"{self.world_size} {self.replicated} {self.flops}".encode())
        for m in self.matrices:
            pieces = " ".join(f"{p.rank}:{p.start}:{p.stop}" for p in m.pieces)
            hasher.update(f"\n{m.name!r} {m.rows} {m.columns} {m.owner} {pieces}".encode())
        return hasher.hexdigest()

    def describe(self, itemsize: int = 2) -> str:
        """Two lines for a person: the work and its balance, and what moves."""
        work = (
            f"{len(self.matrices)} matrices, each on one owner: {sum(self.flops):.3g} FLOPs a step in all, "
            f"busiest rank {self.imbalance():.2f}x the even share"
        )
        if not self.needs_exchange:
            return f"{work}\nnone is cut between ranks, nothing moves"
        cut = "every rank holds all" if self.replicated else f"{self.straddlers()} cut between ranks"
        total, busiest = self.exchanged_bytes(itemsize) / 1e6, max(self.sent_bytes(itemsize)) / 1e6
        return f"{work}\n{cut}: {total:,.1f} MB sent a step, {busiest:,.1f} MB by the busiest rank"


def imbalance(flops: Sequence[int]) -> float:
    """The largest over the mean; 1.0 when there is nothing to do."""
    total = sum(flops)
    return max(flops) * len(flops) / total if total else 1.0


@dataclass(frozen=True)
class CallWork:
    """The Newton-Schulz work of one call: the parameters under the orthogonal rule, and their iteration."""

    names: Sequence[str]
    steps: int = 5
    form: str = "standard"


def plan_exchange(
    layout: ShardLayout,
    call: int,
    names: Sequence[str],
    *,
    steps: int = 5,
    form: str = "standard",
    loads: Sequence[int] | None = None,
) -> ExchangePlan:
    """Chooses owners for the matrices of one call.

    Args:
        layout: Shards of all ranks.
        call: Call id.
        names: Names of the parameters under the orthogonal rule; those of other calls are passed over.
        steps: Newton-Schulz iterations.
        form: Newton-Schulz form, for the cost.
        loads: FLOPs that each rank already has from other calls of the step.
    """
    return plan_step(layout, {call: CallWork(names, steps, form)}, loads)[call]


def plan_step(
    layout: ShardLayout, works: Mapping[int, CallWork], loads: Sequence[int] | None = None
) -> dict[int, ExchangePlan]:
    """Chooses owners for the matrices of all calls of one step together.

    Args:
        layout: Shards of all ranks.
        works: Call id -> its work.
        loads: FLOPs that each rank already has.

    Returns:
        Call id -> plan: those with the lowest (FLOPs of the busiest rank over the step, sum over calls of the
        busiest rank's FLOPs in the call, elements moved) of the portfolio. The first is never above
        longest-first. Equal on all ranks: ties go to the lowest rank.
    """
    base = list(loads) if loads is not None else [0] * layout.world_size
    matrices = [matrix for call, work in works.items() for matrix in _open_matrices(layout, call, work)]
    orders: list[list[int]] = [
        sorted(range(len(matrices)), key=lambda i: (matrices[i].num_candidates, -matrices[i].cost, i)),  # forced first
        sorted(range(len(matrices)), key=lambda i: (-matrices[i].cost, i)),  # longest first
        list(range(len(matrices))),  # natural: often perfect when layers divide the ranks
    ]
    drafts = []
    for order in orders:
        draft = _Draft(matrices, layout, base)
        draft.assign(order)
        draft.lower_busiest()
        drafts.append(draft)
    if drafts[0].anywhere and not any(base):
        packed = balanced([m.cost for m in matrices], layout.world_size, min(max(d.loads) for d in drafts))
        if packed is not None:
            drafts.append(_Draft(matrices, layout, base))
            for index, rank in enumerate(packed):
                drafts[-1].place(index, rank)
    for draft in drafts:
        draft.move_less()
    owners = min(drafts, key=_Draft.score).owners
    plans = {}
    for call in works:
        chosen = [(m, owner) for m, owner in zip(matrices, owners, strict=True) if m.call == call]
        flops = [0] * layout.world_size
        for m, owner in chosen:
            flops[owner] += m.cost
        placed = tuple(_placement(m, owner, layout.replicated) for m, owner in chosen)
        plans[call] = ExchangePlan(layout.world_size, placed, layout.replicated, tuple(flops))
    return plans


@dataclass(frozen=True)
class _Open:
    """A matrix without an owner yet.

    Attributes:
        held: Rank -> elements it holds; empty at stage 0.
        largest: The holder of most elements, the lowest rank of several; -1 at stage 0.
        cost: FLOPs.
        num_candidates: Ranks that may own it.
    """

    call: int
    name: str
    rows: int
    columns: int
    pieces: tuple[Piece, ...]
    held: Mapping[int, int]
    largest: int
    cost: int
    num_candidates: int


def _open_matrices(layout: ShardLayout, call: int, work: CallWork) -> list[_Open]:
    wanted, anywhere = set(work.names), layout.replicated or layout.sharded
    found: list[_Open] = []
    held_by: Mapping[str, Sequence[tuple[int, Fragment]]] = layout.holders(call) if not layout.replicated else {}
    shapes = {name: held[0][1].shape for name, held in held_by.items()}
    if layout.replicated:
        shapes = {f.name: f.shape for shard in layout.shards[0] if shard.call == call for f in shard.fragments}
    for name, shape in shapes.items():
        if name in wanted:
            rows, columns = matrix_shape(shape)
            pieces = tuple(Piece(rank, f.start, f.stop) for rank, f in held_by.get(name, ()))
            held: dict[int, int] = {}
            for piece in pieces:
                held[piece.rank] = held.get(piece.rank, 0) + piece.numel
            # The first of equals is the lowest rank: pieces ascend.
            largest = max(held, key=held.__getitem__, default=-1)
            cost = newton_schulz_flops(rows, columns, work.steps, work.form)
            candidates = layout.world_size if anywhere else len(held)
            found.append(_Open(call, name, rows, columns, pieces, held, largest, cost, candidates))
    return found


def _placement(matrix: _Open, owner: int, replicated: bool) -> MatrixPlacement:
    pieces = (Piece(owner, 0, matrix.rows * matrix.columns),) if replicated else matrix.pieces
    return MatrixPlacement(matrix.name, matrix.rows, matrix.columns, pieces, owner)


class _Draft:
    """Owners under construction, with the loads that follow from them."""

    def __init__(self, matrices: Sequence[_Open], layout: ShardLayout, base: Sequence[int]) -> None:
        self.matrices = matrices
        self.anywhere = layout.replicated or layout.sharded
        self.world_size = layout.world_size
        self.owners = [-1] * len(matrices)
        self.loads = list(base)
        self.call_loads = {m.call: [0] * layout.world_size for m in matrices}
        self.owned: list[set[int]] = [set() for _ in range(layout.world_size)]

    def place(self, index: int, rank: int) -> None:
        """Gives a matrix to `rank`, taking it from its owner if it has one."""
        matrix, before = self.matrices[index], self.owners[index]
        for at, cost in ((before, -matrix.cost), (rank, matrix.cost)):
            if at >= 0:
                self.loads[at] += cost
                self.call_loads[matrix.call][at] += cost
        if before >= 0:
            self.owned[before].remove(index)
        self.owned[rank].add(index)
        self.owners[index] = rank

    def least_loaded(self, matrix: _Open) -> int:
        """The candidate with the lowest load; ties by load in the call, by elements held, by rank."""
        loads, call_loads, held = self.loads, self.call_loads[matrix.call], matrix.held
        candidates: Iterable[int] = held
        if self.anywhere:
            lowest = min(loads)
            candidates = [rank for rank, load in enumerate(loads) if load == lowest]
            if matrix.largest in candidates and not any(call_loads):
                return matrix.largest
        return min(candidates, key=lambda rank: (loads[rank], call_loads[rank], -held.get(rank, 0), rank))

    def assign(self, order: Sequence[int]) -> None:
        """Greedy: each matrix of `order` to its least loaded candidate."""
        for index in order:
            self.place(index, self.least_loaded(self.matrices[index]))

    def lower_busiest(self) -> None:
        """Takes work off the busiest rank while a chain of moves, none to a load as high, allows it."""
        for _ in range(4 * len(self.matrices)):
            peak = max(self.loads)
            busiest = self.loads.index(peak)
            if not self._relieve(busiest, peak - 1, {busiest}):
                return

    def _relieve(self, rank: int, limit: int, visited: set[int]) -> bool:
        """Moves one matrix off `rank`, and others further on, until no load involved exceeds `limit`.

        A rank that could not pass work on once is not tried again: linear, and rarely short of the best.
        """
        for index in sorted(self.owned[rank], key=lambda i: (-self.matrices[i].cost, i)):
            matrix = self.matrices[index]
            if self.loads[rank] - matrix.cost > limit:
                continue
            for other in [self.least_loaded(matrix)] if self.anywhere else sorted(matrix.held):
                if other in visited or len(visited) > CHAIN:
                    continue
                visited.add(other)
                self.place(index, other)
                if self.loads[other] <= limit or self._relieve(other, limit, visited):
                    return True
                self.place(index, rank)
        return False

    def move_less(self) -> None:
        """Gives each matrix to the holder of most of it where no load rises above the busiest of now."""
        peak = max(self.loads)
        peaks = {call: max(loads) for call, loads in self.call_loads.items()}
        for index, matrix in enumerate(self.matrices):
            held, most = matrix.held, matrix.largest
            if (
                most >= 0
                and held[most] > held.get(self.owners[index], 0)
                and (
                    self.loads[most] + matrix.cost <= peak
                    and self.call_loads[matrix.call][most] + matrix.cost <= peaks[matrix.call]
                )
            ):
                self.place(index, most)

    def score(self) -> tuple[int, int, int]:
        """(busiest rank of the step, sum of the busiest of each call, elements moved one way); lower is better."""
        moved = 0
        for matrix, owner in zip(self.matrices, self.owners, strict=True):
            if matrix.held:
                moved += matrix.rows * matrix.columns - matrix.held.get(owner, 0)
        critical = sum(max(loads) for loads in self.call_loads.values())
        return max(self.loads, default=0), critical, moved
