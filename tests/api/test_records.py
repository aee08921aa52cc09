"""Records are dataclasses for all who use them, and patterns are those of ``re``; both are made late."""

from __future__ import annotations

import ast
import copy
import dataclasses
import inspect
import pickle
import re
from pathlib import Path
from typing import Any, ClassVar

import fastshard
import pytest
from fastshard.common import records, regex

PACKAGE = Path(fastshard.__file__).parent


def make_class(decorate: Any, field: Any) -> Any:
    """A frozen class and one made of it, as a decorator makes them."""

    @decorate(frozen=True)
    class Base:
        """A record."""

        name: str
        kind: ClassVar[int] = 3
        folder: str = "x"
        files: list[int] = field(default_factory=list, repr=False)
        digest: str = field(default="", compare=False)

    @decorate(frozen=True)
    class Sub(Base):
        """A record with more."""

        folder: str = "y"
        step: int | None = None

        def __post_init__(self) -> None:
            object.__setattr__(self, "step", (self.step or 0) + 1)

    return Sub


OURS = make_class(records.dataclass, records.field)
THEIRS = make_class(dataclasses.dataclass, dataclasses.field)


def test_signature_and_fields_are_those_of_a_dataclass() -> None:
    ours, theirs = (
        make_class(records.dataclass, records.field),
        make_class(dataclasses.dataclass, dataclasses.field),
    )
    # Before any instance is made, and after.
    for _ in range(2):
        assert str(inspect.signature(ours)) == str(inspect.signature(theirs))
        mine, others = dataclasses.fields(ours), dataclasses.fields(theirs)
        assert [(f.name, f.type, f.repr, f.compare) for f in mine] == [
            (f.name, f.type, f.repr, f.compare) for f in others
        ]
        assert ours.__match_args__ == theirs.__match_args__
        assert ours.__dataclass_params__.frozen and dataclasses.is_dataclass(ours)
        ours("a"), theirs("a")


@pytest.mark.parametrize("kind", [OURS, THEIRS], ids=["ours", "theirs"])
def test_instances_are_those_of_a_dataclass(kind: Any) -> None:
    one = kind("a", files=[1])
    assert (one.name, one.folder, one.files, one.digest, one.step, one.kind) == ("a", "y", [1], "", 1, 3)
    assert one == kind("a", files=[1], digest="of no account") and one != kind("b", files=[1])
    assert one != object() and (one == 3) is False
    assert kind("a").files is not kind("a").files
    assert repr(one) == f"{kind.__qualname__}(name='a', folder='y', digest='', step=1)"
    assert dataclasses.asdict(one) == {"name": "a", "folder": "y", "files": [1], "digest": "", "step": 1}
    assert dataclasses.replace(one, name="c").name == records.replace(one, name="c").name == "c"
    assert copy.deepcopy(one) == copy.copy(one) == one
    with pytest.raises(dataclasses.FrozenInstanceError, match="cannot assign to field 'name'"):
        one.name = "b"
    with pytest.raises(dataclasses.FrozenInstanceError, match="cannot delete field 'name'"):
        del one.name
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'name'"):
        kind()
    with pytest.raises(TypeError, match="unexpected keyword argument 'nmae'"):
        records.replace(one, nmae="c")
    with pytest.raises(TypeError, match="unhashable type: 'list'"):
        hash(one)
    assert hash(kind("a", files=())) == hash(kind("a", files=(), digest="of no account"))


def test_records_within_records_become_dicts() -> None:
    inner = OURS("a")
    nested = OURS({"of": (inner, [inner])}, files=[1])
    plain = {"name": "a", "folder": "y", "files": [], "digest": "", "step": 1}
    whole = {**plain, "name": {"of": (plain, [plain])}, "files": [1]}
    assert records.asdict(nested) == dataclasses.asdict(nested) == whole
    assert records.asdict(nested)["files"] is not nested.files


def test_a_record_that_changes_has_no_hash() -> None:
    @records.dataclass
    class Counted:
        """A record that changes."""

        count: int = 0

    one = Counted()
    one.count += 1
    assert one == Counted(1)
    with pytest.raises(TypeError, match="unhashable"):
        hash(one)


def test_a_pickled_record_comes_back_equal() -> None:
    from fastshard.common.listing import File

    one = File(0, "a/b", 3)
    assert pickle.loads(pickle.dumps(one)) == one


def test_a_pattern_is_compiled_when_it_is_used() -> None:
    late = regex.compile_when_used(r"(a)(\d+)", re.IGNORECASE)
    theirs = re.compile(r"(a)(\d+)", re.IGNORECASE)
    assert late.pattern == theirs.pattern and late.flags == theirs.flags and late.groups == theirs.groups
    assert late.sub("x", "A1a2") == theirs.sub("x", "A1a2") == "xx"
    assert late.search("-A12")[2] == "12" and late.fullmatch("a1b") is None
    with pytest.raises(AttributeError, match="nothing"):
        late.nothing  # noqa: B018
    broken = regex.compile_when_used("(")
    with pytest.raises(re.error):
        broken.match("a")


def test_every_pattern_of_the_package_compiles() -> None:
    """What is compiled late must not fail late."""
    found = 0
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            called = getattr(node.func, "id", None) if isinstance(node, ast.Call) else None
            if called == "compile_when_used" and isinstance(node.args[0], ast.Constant):
                re.compile(node.args[0].value)
                found += 1
    assert found > 100


def test_the_package_makes_its_dataclasses_late() -> None:
    """Each that the standard library makes takes half a millisecond of every start."""
    with_theirs = {
        file.relative_to(PACKAGE).as_posix()
        for file in PACKAGE.rglob("*.py")
        if re.search(r"^\s*(?:from dataclasses|import dataclasses)", file.read_text(), re.MULTILINE)
    }
    # Slots have to be there when a class is made.
    assert with_theirs == {"common/records.py", "verification/stats.py"}
