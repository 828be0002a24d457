"""wgmma: products of four warps at once that are under way until they are waited for.

The product is computed when it is issued, and is in its registers when it has been waited for. What it reads of shared memory
is read once more then, and must be the same. PTX leaves undefined what its registers hold until then, and ptxas mends a
program that uses them by waiting for each product at once: they are then delivered early, and a note says so.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from emulator import fragments
from emulator.descriptors import Descriptor, start
from emulator.errors import Fault, Unknown
from emulator.report import Report
from emulator.shared import ROW, SharedMemory
from emulator.threads import GROUP, Mask, Threads

ROWS = 64  # of a and d
NAN = np.uint32(0xFFFFFFFF)
NO_BATCH = -1


@dataclasses.dataclass
class Product:
    """What one instruction computes, for each of the warpgroups that issued it."""

    slots: tuple[int, ...]  # of its registers
    groups: np.ndarray  # their numbers
    result: np.ndarray  # [groups, 64, n]
    reads: list[tuple[np.ndarray, np.ndarray]]  # bytes in shared memory and what they held, [groups, ...]
    batch: np.ndarray  # of its group's commits
    site: str

    def where(self, those: np.ndarray) -> Product:
        reads = [(offsets[those], held[those]) for offsets, held in self.reads]
        return Product(self.slots, self.groups[those], self.result[those], reads, self.batch[those], self.site)


class Wgmma:
    def __init__(self, threads: Threads, shared: SharedMemory, report: Report):
        self._threads, self._shared, self._report = threads, shared, report
        self._under_way: list[Product] = []
        self._busy: dict[int, np.ndarray] = {}  # slot: in which warpgroups it is under way
        self._touched: set[int] = set()  # slots written since the last wgmma.fence
        self._committed = np.zeros(threads.count // GROUP, "i8")

    # ------------------------------------------------------------------------------------------------------ registers

    def read(self, slot: int, registers: list, m: Mask, site: str) -> np.ndarray:
        self._serialize(slot, registers, m, site)
        return registers[slot]

    def write(self, slot: int, registers: list, value, m: Mask, site: str) -> None:
        self._serialize(slot, registers, m, site)
        registers[slot] = value if m is None else np.where(m, value, registers[slot])
        self._touched.add(slot)

    def _serialize(self, slot: int, registers: list, m: Mask, site: str) -> None:
        busy = self._busy.get(slot)
        if busy is not None and (busy if m is None else busy & m.reshape(-1, GROUP).any(1)).any():
            self._report.notes[f"a register of a wgmma under way is used, ptxas must serialize: {site}"] += 1
            done = [product for product in self._under_way if slot in product.slots]
            self._finish(done, [product for product in self._under_way if slot not in product.slots], registers)

    def fence(self) -> None:
        self._touched.clear()

    # ---------------------------------------------------------------------------------------------------------- issue

    def issue(self, form, left, right, adds, registers: list, m: Mask, site: str) -> None:
        """d = a·b + d, or a·b where `adds` does not hold. `form`: slots of d, n, k, format, sign, transpositions."""
        slots, n, k, kind, sign, trans_a, trans_b = form
        here = self._threads.groups(m, site)
        groups = np.flatnonzero(here)
        reads = []
        if isinstance(left, list):
            a = fragments.matrix_a([x.reshape(-1, GROUP)[groups].reshape(-1) for x in left], kind).reshape(-1, ROWS, k)
        else:
            a = self._operand(left, trans_a, (ROWS, k), kind, groups, reads, site)
        b = self._operand(right, trans_b, (n, k), kind, groups, reads, site)
        product = sign * (a @ np.ascontiguousarray(b.transpose(0, 2, 1)))
        if self._touched.intersection(slots):
            self._report.notes[f"registers are written between wgmma.fence and {site}"] += 1
        adds = self._uniform(adds, groups, "scale-d", site)
        before = self._before(slots, registers, groups, site)
        result = np.where(adds[:, None, None], product + before, product)
        lanes = np.repeat(here, GROUP)
        for slot in slots:
            registers[slot] = np.where(lanes, NAN, registers[slot])
            self._busy[slot] = self._busy.get(slot, np.zeros(here.size, bool)) | here
        self._under_way.append(Product(slots, groups, result, reads, np.full(groups.size, NO_BATCH), site))

    def _before(self, slots, registers: list, groups: np.ndarray, site: str) -> np.ndarray:
        """What d holds, or will hold by the product of the same registers that is under way."""
        held = np.stack([registers[slot] for slot in slots]).view("f4").reshape(len(slots), -1, GROUP)[:, groups]
        before = fragments.accumulated(held.reshape(len(slots), -1))
        busy = [self._busy[slot][groups] for slot in slots if slot in self._busy]
        known = ~np.any(busy, axis=0) if busy else np.ones(groups.size, bool)
        for product in self._under_way:
            if product.slots == slots:
                mine, its = np.isin(groups, product.groups), np.isin(product.groups, groups)
                before[mine] = product.result[its]
                known |= mine
        if not known.all():
            raise self._fault(site, groups[np.argmin(known)], "some of its registers are under way")
        return before

    def _operand(self, encoded, transposed: bool, shape: tuple[int, int], kind: str, groups, reads, site: str) -> np.ndarray:
        """float32 [groups, *shape] of the matrix that descriptors mean."""
        size = 4 if kind == "tf32" else 2
        encoded = self._uniform(encoded, groups, "a descriptor", site)
        if (encoded >> np.uint64(16) != encoded[0] >> np.uint64(16)).any() or (transposed and size != 2):
            raise Unknown(f"{site}: descriptors {encoded}")
        descriptor = Descriptor.of(int(encoded[0]))
        offsets = descriptor.swizzled(start(encoded)[:, None, None] + descriptor.offsets(*shape, size, transposed))
        if int(offsets.max()) + size > self._shared.size:
            what = f"a descriptor reaches {int(offsets.max()):#x}, out of bounds of shared memory, of {self._shared.size} bytes"
            raise self._fault(site, groups[0], what)
        offsets += (groups * GROUP // self._threads.per_block * self._shared.stride)[:, None, None]
        if self._shared.unfenced[offsets // ROW].any():
            self._report.problems[f"wgmma reads what was written without fence.proxy.async since: {site}"] += 1
        self._shared.races.read(offsets.reshape(-1), size, groups * GROUP, site)
        held = self._shared.bytes.view(f"u{size}")[offsets // size]
        reads.append((offsets, held))
        return fragments.elements(held, kind).reshape(held.shape) if size == 4 else _halves(held, kind)

    def _uniform(self, values, groups: np.ndarray, what: str, site: str) -> np.ndarray:
        """The value of each warpgroup, which all of its threads must have."""
        values = values.reshape(-1, GROUP)[groups]
        if (differs := (values != values[:, :1]).any(1)).any():
            raise self._fault(site, groups[np.argmax(differs)], f"{what} differs within a warpgroup")
        return values[:, 0]

    # --------------------------------------------------------------------------------------------------- commit, wait

    def commit(self, m: Mask, site: str) -> None:
        here = self._threads.groups(m, site)
        for product in self._under_way:
            new = (product.batch == NO_BATCH) & here[product.groups]
            product.batch[new] = self._committed[product.groups[new]]
        self._committed += here

    def wait(self, pending: int, registers: list, m: Mask, site: str) -> None:
        """Until at most so many batches of a warpgroup are pending."""
        here = self._threads.groups(m, site)
        left, done = [], []
        for product in self._under_way:
            ready = here[product.groups] & (product.batch != NO_BATCH)
            ready &= product.batch < self._committed[product.groups] - pending
            if ready.any():
                done.append(product.where(ready))
            if not ready.all():
                left.append(product.where(~ready))
        self._finish(done, left, registers)

    def _finish(self, done: list[Product], left: list[Product], registers: list) -> None:
        self._under_way = left
        for number, product in enumerate(done):
            for offsets, held in product.reads:
                changed = self._shared.bytes.view(held.dtype)[offsets // held.itemsize] != held
                if changed.any():
                    group = product.groups[np.argmax(changed.any((1, 2)))]
                    raise self._fault(product.site, group, "shared memory that it reads is written while it is under way")
            later = [x.groups for x in (*done[number + 1 :], *left) if x.slots == product.slots]
            last = ~np.isin(product.groups, np.concatenate(later)) if later else np.ones(product.groups.size, bool)
            if last.any():
                self._deliver(product.where(last), registers)

    def _deliver(self, product: Product, registers: list) -> None:
        lanes = (product.groups[:, None] * GROUP + np.arange(GROUP)).reshape(-1)
        for slot, value in zip(product.slots, fragments.accumulators(product.result).view("u4"), strict=True):
            registers[slot] = registers[slot].copy()
            registers[slot][lanes] = value
            self._busy[slot][product.groups] = False

    def check_end(self) -> None:
        if self._under_way:
            product = self._under_way[0]
            raise self._fault(product.site, product.groups[0], "nobody waits for it")

    def _fault(self, site: str, group: int, what: str) -> Fault:
        return self._threads.fault(site, int(group) * GROUP, what)


def _halves(held: np.ndarray, kind: str) -> np.ndarray:
    return held.view("f2").astype("f4") if kind == "f16" else fragments.from_bf16(held)
