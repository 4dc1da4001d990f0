"""A synchronous gang on a virtual clock, and what a watcher on another machine sees of its files."""

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

Op = tuple[float, str, tuple[int, ...], str]  # seconds until it happens, what, which ranks, phase or size


@dataclass(frozen=True)
class Shape:
    """How a run behaves while it is healthy. Seconds; `(from, to)` is drawn anew each time; 0 and None: never."""

    nodes: int = 2
    ranks_per_node: int = 2
    startup_s: tuple[float, float] = (60, 400)
    step_s: float = 2.0
    spread: float = 0.1  # of the logarithm
    drift_an_hour: float = 1.0
    slow_share: float = 0.0
    slow_s: tuple[float, float] = (0, 0)
    compile_s: tuple[float, float] = (0, 0)  # more, in each of the first three steps
    recompile_every_s: float = 0
    recompile_s: tuple[float, float] = (0, 0)
    checkpoint_every_s: float = 1800
    checkpoint_s: tuple[float, float] = (20, 60)
    saved_by_all: bool = True
    evaluation_every_s: float = 0
    evaluation_s: tuple[float, float] = (0, 0)
    evaluation_beats: bool = False
    data_s: tuple[float, float] | None = None
    log_every_steps: int = 10
    rotate_every_s: float = 0
    only_rank_0: bool = False
    slower_at_s: float = math.inf
    slower: float = 1.0
    lump_s: tuple[float, float] | None = None  # between two moments at which a node's file is fetched anew
    lump_from_s: float = 0.0
    away_every_s: float = 0  # the watcher's file system shows nothing new
    away_s: tuple[float, float] = (0, 0)
    skew_s: float = 0.0  # of the nodes' clocks; they also step by an hour


class World:
    def __init__(self, shape: Shape, seed: int) -> None:
        self.shape, self.rng = shape, random.Random(seed)
        self.world = shape.nodes * shape.ranks_per_node
        self.t, self.beats, self.step, self.log_bytes = 0.0, 0, -1, 100
        self.extra = [0] * self.world
        self.phase = ["startup"] * self.world
        self.behind = [0] * self.world
        self.silent_since: dict[int, float] = {}  # rank → when its process or node stopped
        self.missing: set[int] = set()
        self.frozen = False
        self.logs_on = False  # although frozen
        self.away_until = self.away_at = 0.0
        self.skew = [self.rng.uniform(-shape.skew_s, shape.skew_s) for _ in range(shape.nodes)]
        self._program = self._run()
        self._next = next(self._program)
        self._due = self._next[0]
        self._shown: list[list[tuple[int, int, int, int, str]]] = [[] for _ in range(shape.nodes)]
        self._fetch_at = [self.rng.uniform(0, 60) for _ in range(shape.nodes)]
        self._log_shown, self._log_fetch_at = 100, 0.0
        self._away_next = self._after(shape.away_every_s)

    # ------------------------------------------------------------------------------------------------ what is seen

    def look(self, t: float) -> tuple[list[tuple[int, int, int, int, int, str]], int]:
        """At `t`: (rank, node, beat, flush, step, phase) of each rank whose slot is written, and the size of the logs."""
        lumpy = self.shape.lump_s is not None and t >= self.shape.lump_from_s
        if lumpy:
            self._fetch_lumps(t)
        self.advance(t)
        if t >= self._away_next:
            self.away_until = t + self.rng.uniform(*self.shape.away_s)
            self._away_next = self.away_until + self._after(self.shape.away_every_s)
        if t >= self.away_until and not lumpy:
            for node in range(self.shape.nodes):
                self._fetch(node)
            self._log_shown = self.log_bytes
        return [(slot[0], node, *slot[1:]) for node, slots in enumerate(self._shown) for slot in slots], self._log_shown

    def _fetch_lumps(self, t: float) -> None:
        while True:
            node = min(range(self.shape.nodes), key=self._fetch_at.__getitem__)
            at = self._fetch_at[node]
            if at > t:
                break
            self.advance(at)
            if at >= self.away_until:
                self._fetch(node)
            self._fetch_at[node] = at + self.rng.uniform(*(self.shape.lump_s or (1, 1)))
        if t >= self._log_fetch_at and t >= self.away_until:
            self._log_shown = self.log_bytes
            self._log_fetch_at = t + self.rng.uniform(*(self.shape.lump_s or (1, 1)))

    def _fetch(self, node: int) -> None:
        first = node * self.shape.ranks_per_node
        self._shown[node] = [
            (rank, self._beat(rank), self._flush(rank), self._step(rank), self.phase[rank])
            for rank in range(first, first + self.shape.ranks_per_node)
            if rank not in self.missing and (rank == 0 or not self.shape.only_rank_0)
        ]

    def _beat(self, rank: int) -> int:
        return self.beats + self.extra[rank] - self.behind[rank]

    def _step(self, rank: int) -> int:
        return max(-1, self.step - self.behind[rank])

    def _flush(self, rank: int) -> int:
        return int(min(self.t, self.silent_since.get(rank, math.inf))) + 1

    # ---------------------------------------------------------------------------------------------- what happens

    def advance(self, t: float) -> None:
        while not self.frozen and self._due <= t:
            self.t = self._due
            self._apply(self._next)
            self._next = next(self._program)
            self._due += self._next[0]
        if self.frozen and self.logs_on:
            self.log_bytes += int((t - self.t) * 10)
        self.t = max(self.t, t)

    def _apply(self, op: Op) -> None:
        _, what, ranks, word = op
        if what == "step":
            self.step += 1
            self.beats += 1
            for rank in ranks or range(self.world):
                self.phase[rank] = "step"
        elif what == "log":
            self.log_bytes += 80
        elif what == "rotate":
            self.log_bytes = int(word)
        else:
            for rank in ranks or range(self.world):
                self.extra[rank] += 1
                if what == "enter":
                    self.phase[rank] = word
                elif what == "leave":
                    self.phase[rank] = "step"

    def _after(self, every_s: float) -> float:
        return self.rng.uniform(0.7, 1.3) * every_s if every_s else math.inf

    def _run(self) -> Iterator[Op]:
        shape, rng = self.shape, self.rng
        yield (rng.uniform(*shape.startup_s), "log", (), "")
        checkpoint, evaluation = self._after(shape.checkpoint_every_s), self._after(shape.evaluation_every_s)
        recompile, rotate = self._after(shape.recompile_every_s), self._after(shape.rotate_every_s)
        for number in range(1 << 62):
            step_s = shape.step_s * math.exp(rng.gauss(0, shape.spread)) * shape.drift_an_hour ** (self.t / 3600)
            if self.t >= shape.slower_at_s:
                step_s *= shape.slower
            if number < 3:
                step_s += rng.uniform(*shape.compile_s)
            elif rng.random() < shape.slow_share:
                step_s += rng.uniform(*shape.slow_s)
            if self.t >= recompile:
                recompile = self.t + self._after(shape.recompile_every_s)
                step_s += rng.uniform(*shape.recompile_s)
            if shape.data_s is not None and number > 0:
                yield (0.0, "enter", (), "data")
                yield (rng.uniform(*shape.data_s) ** 2 / shape.data_s[1], "leave", (), "")
            yield (step_s, "step", (), "")
            if number % shape.log_every_steps == 0:
                yield (0.0, "log", (), "")
            if self.t >= rotate:
                rotate = self.t + self._after(shape.rotate_every_s)
                yield (0.0, "rotate", (), str(rng.choice([0, 40, self.log_bytes])))
            if self.t >= checkpoint:
                who = () if shape.saved_by_all else (0,)
                yield from self._phase("checkpoint", rng.uniform(*shape.checkpoint_s), who, beats=False)
                checkpoint = self.t + self._after(shape.checkpoint_every_s)
            if self.t >= evaluation:
                yield from self._phase("evaluation", rng.uniform(*shape.evaluation_s), (), shape.evaluation_beats)
                evaluation = self.t + self._after(shape.evaluation_every_s)

    def _phase(self, name: str, lasts_s: float, who: tuple[int, ...], beats: bool) -> Iterator[Op]:
        yield (0.0, "enter", who, name)
        parts = max(1, int(lasts_s / 20)) if beats else 1
        for _ in range(parts - 1):
            yield (lasts_s / parts, "beat", who, "")
        yield (lasts_s / parts, "leave", who, "")
        yield (0.0, "log", (), "")
