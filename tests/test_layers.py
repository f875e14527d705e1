"""Imports run downward only; `decoding` has no output, no tokenizer and one place of host reads."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "mlx_redrafter"

# Top first, one layer a line. A module may import from its own layer and from those below.
LAYERS = [
    {"__main__"},
    {"cli"},
    {"serving", "benchmarking", "training"},
    {"chat"},
    {"generate"},
    {"load", "prompt_cache", "text"},
    {"registry"},
    {"hub", "shipped"},
    {"conversion"},
    {"decoding"},
    {"formats"},
    {"machine"},
    {"errors"},
]
DECODING = [
    {"loop"},
    {"proposers", "target", "choose", "accept", "controller", "selfcheck"},
    {"caches"},
    {"tree", "drafter", "stats", "families", "options"},
]

# What an array gives back as a Python value waits for the device.
READS = {"item", "tolist"}
REDUCTIONS = {"all", "any", "argmax", "argmin", "max", "mean", "min", "sum"}
HOST_QUERIES = {"default_device", "issubdtype", "is_available"}


def modules(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.py"))


def name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def is_package(module: str) -> bool:
    return PACKAGE.parent.joinpath(*module.split(".")).is_dir()


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Every import in the file, also those inside functions, as (line, full name)."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            for alias in node.names:
                yield node.lineno, f"{node.module}.{alias.name}"


def rank(module: str, prefix: str, layers: list[set[str]]) -> int:
    """The layer of a module below `prefix`, 0 on top."""
    part = module.removeprefix(prefix + ".").split(".")[0]
    for number, layer in enumerate(layers):
        if part in layer:
            return number
    raise AssertionError(f"{prefix}.{part} has no place in tests/test_layers.py: give it one")


@pytest.mark.parametrize(
    ("prefix", "layers"),
    [("mlx_redrafter", LAYERS), ("mlx_redrafter.decoding", DECODING)],
    ids=["package", "decoding"],
)
def test_imports_run_downward(prefix: str, layers: list[set[str]]) -> None:
    upward = []
    for path in modules(PACKAGE.parent.joinpath(*prefix.split("."))):
        module = name(path)
        if module == prefix:
            continue  # the package's own face names what lies below it
        for line, imported in imports(path):
            inside = imported.startswith(prefix + ".") and imported != "mlx_redrafter.__version__"
            if inside and rank(imported, prefix, layers) < rank(module, prefix, layers):
                upward.append(f"{path}:{line}: {module} imports {imported}")
    assert not upward, "\n".join(upward)


def test_only_the_package_itself_uses_its_public_names() -> None:
    found = [
        f"{path}:{line}: import it from where it is defined"
        for path in modules(PACKAGE)
        for line, imported in imports(path)
        if name(path) != "mlx_redrafter"
        and imported.startswith("mlx_redrafter.")
        and imported.count(".") == 1
        and imported != "mlx_redrafter.__version__"
        and not is_package(imported)
        and not (PACKAGE / f"{imported.split('.')[1]}.py").exists()
    ]
    assert not found, "\n".join(found)


def test_decoding_knows_no_tokenizer_and_prints_nothing() -> None:
    found = []
    for path in modules(PACKAGE / "decoding"):
        for line, imported in imports(path):
            if imported.split(".")[0] in ("transformers", "tokenizers", "sentencepiece", "logging"):
                found.append(f"{path}:{line}: imports {imported}")
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in (
                "print",
                "sys.stdout.write",
            ):
                found.append(f"{path}:{node.lineno}: prints")
    assert not found, "\n".join(found)


def host_reads(source: str) -> list[tuple[int, str]]:
    """Where the source waits for the device, as far as syntax shows: (line, code)."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            called = node.func
            if isinstance(called, ast.Attribute) and called.attr in READS:
                found.append((node.lineno, ast.unparse(node)))
            if ast.unparse(called) in ("bool", "np.array", "np.asarray"):
                found.append((node.lineno, ast.unparse(node)))
        for test in conditions(node):
            if any(is_array(part) for part in ast.walk(test)):
                found.append((test.lineno, ast.unparse(test)))
    return found


def conditions(node: ast.AST) -> Iterator[ast.expr]:
    """What Python asks for its truth."""
    if isinstance(node, ast.If | ast.While | ast.IfExp | ast.Assert):
        yield node.test
    elif isinstance(node, ast.BoolOp):
        yield from node.values
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield node.operand
    elif isinstance(node, ast.comprehension):
        yield from node.ifs


def is_array(node: ast.AST) -> bool:
    """A call that surely gives an array: mx.something(...), or a reduction of anything."""
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
        return False
    if isinstance(node.func.value, ast.Name) and node.func.value.id == "mx":
        return node.func.attr not in HOST_QUERIES
    return node.func.attr in REDUCTIONS


def test_decoding_reads_the_device_in_one_place() -> None:
    readers = []
    strays = []
    for path in modules(PACKAGE / "decoding"):
        source = path.read_text()
        allowed: set[int] = set()
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef) and node.name == "read":
                readers.append(f"{path}:{node.lineno}")
                assert node.end_lineno is not None
                allowed |= set(range(node.lineno, node.end_lineno + 1))
        for line, code in host_reads(source):
            if line not in allowed:
                strays.append(f"{path}:{line}: {code}")
    assert not strays, "host reads outside read():\n" + "\n".join(strays)
    assert len(readers) <= 1, f"more than one read(): {readers}"


@pytest.mark.parametrize(
    "code",
    [
        "n = x.item()",
        "n = x[0].tolist()",
        "if bool(x): n = 1",
        "a = np.array(x)",
        "if mx.any(x): n = 1",
        "while not (x > 0).all(): n = 1",
        "n = 1 if x.max() > 3 else 2",
        "assert mx.allclose(a, b)",
        "n = [y for y in z if mx.equal(y, 1)]",
        "n = a or mx.array(0)",
    ],
)
def test_a_host_read_is_seen(code: str) -> None:
    assert host_reads(code)


@pytest.mark.parametrize(
    "code",
    [
        "if n > 3: x = mx.any(y)",
        "x = mx.where(mx.any(y), a, b)",
        "if mx.metal.is_available(): x = 1",
    ],
)
def test_device_work_is_no_host_read(code: str) -> None:
    assert not host_reads(code)
