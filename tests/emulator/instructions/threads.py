"""What threads do together: barriers, fences, and looking at each other's registers."""

from emulator.errors import Unknown
from emulator.parser import Instruction, Integer, Pair
from emulator.translator import Translator, instruction


@instruction("bar", "barrier")
def bar(t: Translator, i: Instruction):
    if i.modifiers[0] == "warp":
        t.emit(f"M.threads.check_warps(m, {t.site})")
    elif i.modifiers[0] in ("sync", "cta") and len(i.operands) == 1:
        t.emit("M.barrier(m)")
    else:
        raise Unknown("a barrier of some threads")


@instruction("fence")
def fence(t: Translator, i: Instruction):
    """fence.proxy.async shows wgmma what was written to shared memory. Others order what is in order here anyway."""
    if i.modifiers[0] == "proxy":
        if "async" not in i.modifiers:
            raise Unknown("a proxy")
        t.emit(f"M.shared.fence({t.mask()})")


@instruction("membar", "griddepcontrol", "setmaxnreg", "prefetch")
def nothing(t: Translator, i: Instruction):
    """They change when something happens, not what."""


@instruction("trap")
def trap(t: Translator, i: Instruction):
    t.emit(f"M.trap({t.mask()}, {t.site})")


@instruction("shfl")
def shfl(t: Translator, i: Instruction):
    _, mode, kind = i.modifiers
    if kind != "b32":
        raise Unknown(f"the type {kind}")
    target, source, lane, clamp, _ = i.operands
    targets = target.parts if isinstance(target, Pair) else (target,)
    where = [repr(x.value & 0xFFFFFFFF) if isinstance(x, Integer) else t.read(x, "u4") for x in (lane, clamp)]
    result = t.variable(f"M.warps.shuffle({mode!r}, {t.read_array(source, 'u4')}, {', '.join(where)}, {t.mask()}, {t.site})")
    t.write(targets[0], "u4", f"{result}[0]")
    for inside in targets[1:]:
        t.write(inside, "?", f"{result}[1]")


@instruction("vote")
def vote(t: Translator, i: Instruction):
    mode = i.modifiers[1]
    predicate = t.read_array(i.operands[1], "?")
    t.write(i.operands[0], "u4" if mode == "ballot" else "?", f"M.warps.vote({mode!r}, {predicate}, {t.mask()}, {t.site})")


@instruction("elect")
def elect(t: Translator, i: Instruction):
    """One thread of the warp: the first."""
    (target, _) = i.operands
    assert isinstance(target, Pair)
    t.emit(f"M.threads.check_warps(m, {t.site})")
    t.write(target.parts[0], "u4", "M.full(u4(0))")
    t.write(target.parts[1], "?", "M.threads.lane == 0")


@instruction("redux")
def redux(t: Translator, i: Instruction):
    view = {"s": "i4", "u": "u4", "b": "u4"}[i.kind[0]]
    source = t.read_array(i.operands[1], view)
    t.write(i.operands[0], view, f"M.warps.reduce({i.modifiers[1]!r}, {source}, {t.mask()}, {t.site})")
