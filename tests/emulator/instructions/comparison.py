"""Comparisons, and choices by their result."""

from emulator import types
from emulator.errors import Unknown
from emulator.floats import flush, from_bf16, from_f16
from emulator.parser import Instruction, Pair
from emulator.translator import Translator, instruction

SYMBOLS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "lo": "<", "ls": "<=", "hi": ">", "hs": ">="}
UNORDERED = "(np.isnan({0}) | np.isnan({1}))"
COMBINED = {"and": "&", "or": "|", "xor": "^"}
TESTS = {
    "finite": "np.isfinite({})",
    "infinite": "np.isinf({})",
    "number": "~np.isnan({})",
    "notanumber": "np.isnan({})",
}


@instruction("setp")
def setp(t: Translator, i: Instruction):
    """setp.lt.and.f32 p, a, b, q: p = (a < b) and q."""
    comparison, *combination = [x for x in i.modifiers[:-1] if x != "ftz"]
    target, *operands = i.operands
    if isinstance(target, Pair):
        raise Unknown("two results of setp")
    if i.kind in ("f16", "bf16"):
        convert = t.call(from_f16 if i.kind == "f16" else from_bf16, "{}")
        sources = [t.variable(convert.format(t.read_array(x, "u2"))) for x in operands[:2]]
    else:
        sources = [t.read_array(operands[0], types.view(i.kind)), t.read(operands[1], types.view(i.kind))]
        if "ftz" in i.modifiers:
            sources = [t.variable(t.call(flush, x)) for x in sources]
    result = f"({_template(comparison, types.floating(i.kind))})".format(*sources)
    if combination:
        (how,) = combination
        result = f"{result} {COMBINED[how]} {t.read(operands[2], '?')}"
    t.write(target, "?", result)


def _template(comparison: str, floating: bool) -> str:
    """Beside a NaN all comparisons are false, those that end in u true."""
    if comparison in ("num", "nan"):
        return UNORDERED if comparison == "nan" else f"~{UNORDERED}"
    if not floating:
        return f"{{0}} {SYMBOLS[comparison]} {{1}}"
    plain = f"({{0}} {SYMBOLS[comparison[:2]]} {{1}})"
    if len(comparison) == 3 and comparison.endswith("u"):
        return f"{plain} | {UNORDERED}"
    return f"{plain} & ~{UNORDERED}" if comparison == "ne" else plain


@instruction("selp")
def selp(t: Translator, i: Instruction):
    *sources, predicate = i.operands[1:]
    view = types.view(i.kind)
    a, b = (t.read(x, view) for x in sources)
    t.write(i.operands[0], view, f"where({t.read_array(predicate, '?')}, {a}, {b})")


@instruction("testp")
def testp(t: Translator, i: Instruction):
    t.elementwise(i, types.view(i.kind), TESTS[i.modifiers[0]], to="?")
