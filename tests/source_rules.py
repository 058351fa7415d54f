"""Rules that the source obeys, and the table of layers: which module may import which."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

# Highest first. A module imports from its own layer and from those below. The names are modules and subpackages of
# whence; "whence" itself is its __init__, the contents page, which nothing below the plots imports.
LAYERS = (
    ("cli", "__main__"),
    ("plots", "tabular", "sklearn", "integrations"),
    ("whence",),
    ("api", "fitting", "tracer"),
    ("trees",),
    ("io", "report"),  # these below the tracer, which offers them as methods
    ("trust",),
    ("influence",),
    ("estimators", "results"),
    ("curvature",),
    ("jacobian",),
    ("data",),
    ("likelihoods",),
    ("runtime", "linalg"),
    ("errors", "display", "_version"),
)
HEIGHT = {unit: -depth for depth, layer in enumerate(LAYERS) for unit in layer}

DEPENDENCIES = {"torch", "numpy", "safetensors"}
# Everything else is an extra and is imported inside the function that needs it. Two parts import theirs at the top: the
# command line, which is built by decorators at import (not cli/__init__.py, the entry point), and tables.
EXTRAS = {"whence.cli.": {"typer", "rich", "pandas"}, "whence.tabular.": {"pandas"}}
# These modules are made of another library's classes and are imported by those who use that library.
GUESTS = {
    "whence.sklearn": "sklearn",
    "whence.integrations.lightning": "lightning",
    "whence.integrations.transformers": "transformers",
    "whence.jacobian.fused": "triton",
}

PUBLIC_MODULES = {"whence.plots", "whence.cli", "whence.sklearn"}  # beside the names in whence.__all__
SAYS_NOTHING = {"utils", "util", "helpers", "common", "misc"}


class Module(NamedTuple):
    name: str  # dotted
    path: Path
    lines: list[str]
    tree: ast.Module


class Import(NamedTuple):
    module: str  # dotted and absolute
    name: str | None  # of `from module import name`
    line: int
    scope: str  # "module", "function" or "typing"


def read(src: Path, package: str) -> list[Module]:
    """All modules of a package; none when the package does not exist."""
    found = []
    for path in sorted((src / package).rglob("*.py")):
        name = ".".join(path.relative_to(src).with_suffix("").parts).removesuffix(".__init__")
        text = path.read_text(encoding="utf-8")
        found.append(Module(name, path, text.splitlines(), ast.parse(text)))
    return found


def read_both(src: Path) -> list[Module]:
    return read(src, "whence") + read(src, "whence_paper")


def imports(module: Module) -> Iterator[Import]:
    """Every import of a module, at whatever depth, with relative ones made absolute."""

    def visit(parent: ast.AST, scope: str) -> Iterator[Import]:
        for node in ast.iter_child_nodes(parent):
            if isinstance(node, ast.Import):
                yield from (Import(alias.name, None, node.lineno, scope) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                origin = absolute(module, node)
                yield from (Import(origin, alias.name, node.lineno, scope) for alias in node.names)
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield from visit(node, "function")
            elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
                yield from visit(node, "typing")
            else:
                yield from visit(node, scope)

    yield from visit(module.tree, "module")


def absolute(module: Module, node: ast.ImportFrom) -> str:
    """The dotted name after `from`, whether it was written with dots in front or not."""
    if not node.level:
        return node.module or ""
    parts = module.name.split(".")
    up = node.level - (module.path.name == "__init__.py")
    return ".".join(parts[: len(parts) - up] + ([node.module] if node.module else []))


def targets(module: Module, known: set[str]) -> Iterator[tuple[Import, str]]:
    """The modules in `known` that a module imports: `from a import b` is a.b where that is a module, else a."""
    for found in imports(module):
        candidates = (f"{found.module}.{found.name}", found.module)
        target = next((name for name in candidates if name in known), None)
        if target is not None and target != module.name:
            yield found, target


def unit(name: str) -> str:
    """The part of whence that a module belongs to: whence.curvature.dual -> curvature."""
    return name.split(".")[1] if "." in name else name


def imports_pointing_up(src: Path) -> list[str]:
    complaints = []
    whence = read(src, "whence")
    known = {module.name for module in whence}
    for module in whence:
        if unit(module.name) not in HEIGHT:
            complaints.append(f"{module.name} is in no layer: give {unit(module.name)!r} its place in LAYERS")
            continue
        complaints += [
            f"{module.name}:{found.line} imports {target}, which is in a higher layer"
            for found, target in targets(module, known)
            if HEIGHT.get(unit(target), -len(LAYERS)) > HEIGHT[unit(module.name)]
        ]
    return complaints


def import_cycles(src: Path) -> list[str]:
    everything = read_both(src)
    known = {module.name for module in everything}
    graph = {module.name: {target for _, target in targets(module, known)} for module in everything}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return [f"these import each other in a circle: {' <- '.join(error.args[1])}"]
    return []


def foreign_imports(src: Path) -> list[str]:
    complaints = []
    for module in read(src, "whence"):
        allowed = DEPENDENCIES | {"whence"} | sys.stdlib_module_names
        allowed |= next((extra for part, extra in EXTRAS.items() if module.name.startswith(part)), set())
        if module.name in GUESTS:
            allowed |= {GUESTS[module.name]}
        for found in imports(module):
            root = found.module.split(".")[0]
            if root == "whence_paper":
                complaints.append(f"{module.name}:{found.line} imports whence_paper: the library knows no experiment")
            elif found.scope == "module" and root not in allowed:
                complaints.append(f"{module.name}:{found.line} imports {root} at the top: it is an extra")
    return complaints


def unexplained_local_imports(src: Path) -> list[str]:
    return [
        f"{module.name}:{found.line} imports {found.module} in a function: say why beside it or above it"
        for module in read_both(src)
        for found in imports(module)
        if found.scope == "function" and not has_comment(module.lines, found.line)
    ]


def has_comment(lines: list[str], line: int) -> bool:
    """Whether a line ends in a comment, or one stands above the run of imports that the line belongs to."""
    if "#" in lines[line - 1]:
        return True
    above = line - 1
    while lines[above - 1].lstrip().startswith(("import ", "from ")):
        above -= 1
    return lines[above - 1].lstrip().startswith("#")


def private_use_by_the_paper(src: Path) -> list[str]:
    complaints = []
    public = public_names(src) | {name.removeprefix("whence.") for name in PUBLIC_MODULES}
    for module in read(src, "whence_paper"):
        used = [
            (node.lineno, node.attr)
            for node in ast.walk(module.tree)
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "whence"
        ]
        complaints += [f"{module.name}:{line} uses whence.{name}" for line, name in used if name not in public]
        for found in imports(module):
            if found.module.split(".")[0] != "whence":
                continue
            inside = found.module not in PUBLIC_MODULES | {"whence"}
            private = found.name is not None and (
                found.name.startswith("_") or (found.module == "whence" and found.name not in public)
            )
            if inside or private:
                complaints.append(f"{module.name}:{found.line} imports {found.module} {found.name or ''}".rstrip())
    return [f"{complaint}, which is not public" for complaint in complaints]


def public_names(src: Path) -> set[str]:
    """What whence/__init__.py lists in __all__, and its version."""
    for module in read(src, "whence"):
        for node in module.tree.body if module.name == "whence" else ():
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                return {*ast.literal_eval(node.value), "__version__"}
    return {"__version__"}


def names_that_say_nothing(src: Path) -> list[str]:
    return [
        module.name for module in read_both(src) if SAYS_NOTHING & {part.strip("_") for part in module.name.split(".")}
    ]


RULES = (
    imports_pointing_up,
    import_cycles,
    foreign_imports,
    unexplained_local_imports,
    private_use_by_the_paper,
    names_that_say_nothing,
)
