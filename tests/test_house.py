"""The rooms of the house, and the arrows between them: each file imports only from those further down."""

import ast
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PACKAGE = ROOT / "jflash"

# From the roof to the cellar. Rooms of one line are side by side and know nothing of each other; files of one room may.
FLOORS = (
    "__main__",
    "proof",
    "drop_in flax equinox ring_attention visits",
    "attention",
    "tuning",
    "parallel",
    "kernels",
    "reference",
    "merge",
    "derivatives",
    "tile",
    "launch",
    "score",
    "machine_code linear",
    "numerics shapes varying",
)
FLOOR = {room: n for n, rooms in enumerate(FLOORS) for room in rooms.split()}
FILES = [path for path in sorted(PACKAGE.rglob("*.py")) if path != PACKAGE / "__init__.py"]  # that one shows what is there


def room_of(path: pathlib.Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported(path: pathlib.Path) -> set[str]:
    """The rooms that a file imports from, its own left out, wherever in it the import stands."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute here"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        found |= {name.split(".")[1] for name in names if name.startswith("jflash.")}
    return found - {room_of(path)}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_arrows_run_down(path):
    for room in imported(path):
        assert FLOOR[room_of(path)] < FLOOR[room], f"{path.relative_to(ROOT)} imports from {room}, which is not below it"


def test_within_a_room_there_is_no_circle():
    graph = {}
    for path in FILES:
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        modules = {
            f"{node.module}.{alias.name}"
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.ImportFrom) and node.module
            for alias in node.names
        }
        modules |= {module.rpartition(".")[0] for module in modules}
        graph[name] = modules

    def follow(name, above):
        assert name not in above, f"{' -> '.join((*above, name))} is a circle"
        for other in graph[name] & graph.keys() - {name}:
            follow(other, (*above, name))

    for name in graph:
        follow(name, ())


def test_the_house_has_no_other_rooms():
    assert {room_of(path) for path in FILES} == FLOOR.keys()


def test_tests_mirror_it():
    """What is tested by itself stands in the room of its name; the rest of the rooms are tests of all of them together."""
    rooms = {path.name for path in (ROOT / "tests").iterdir() if path.is_dir() and not path.name.startswith(("_", "."))}
    assert rooms - {"benchmarks", "emulator"} <= FLOOR.keys()
