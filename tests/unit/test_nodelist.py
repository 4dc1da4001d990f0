"""Node lists against what `scontrol show hostnames` and `show hostlist` of Slurm 22.05.8 gave for them."""

import pytest

from krea_runner.schedulers.nodelist import NodelistError, expand, fold

EXPANDED = {
    "": [],
    "n1": ["n1"],
    "n[01-04,7]": ["n01", "n02", "n03", "n04", "n7"],
    "r[1-2]n[01-03]": ["r1n01", "r1n02", "r1n03", "r2n01", "r2n02", "r2n03"],
    "a[1-2]b[1-2]c[1-2]": ["a1b1c1", "a1b1c2", "a2b1c1", "a2b1c2", "a1b2c1", "a1b2c2", "a2b2c1", "a2b2c2"],
    "n[1-2]-ib[0-1]": ["n1-ib0", "n1-ib1", "n2-ib0", "n2-ib1"],
    "n[1-2][3-4]": ["n13", "n14", "n23", "n24"],
    "n[1-2]x": ["n1x", "n2x"],  # from 24.11 on
    "a[1-2]b[1-2].c,d": ["a1b1.c", "a1b2.c", "a2b1.c", "a2b2.c", "d"],
    "n[09-11]": ["n09", "n10", "n11"],
    "n[001-2]": ["n001", "n002"],
    "n[1-2],n1": ["n1", "n2", "n1"],
    ",a,,c,": ["a", "c"],
    "[1-3]": ["1", "2", "3"],
    "n1-2": ["n1-2"],
}
FOLDED = {
    "n[01-02,3]": ["n01", "n02", "n3"],
    "n[3,2,1]": ["n3", "n2", "n1"],
    "n[1,1-2]": ["n1", "n1", "n2"],
    "n[99-100]": ["n99", "n100"],
    "n[09-10]": ["n09", "n10"],
    "n[1,02]": ["n1", "n02"],
    "n[10,09]": ["n10", "n09"],
    "r1n[1-2],r2n[1-2]": ["r1n1", "r1n2", "r2n1", "r2n2"],
    "n1,a,n2": ["n1", "a", "n2"],
    "a,a": ["a", "a"],
    "n1x,n2x": ["n1x", "n2x"],
    "[1-3]": ["1", "2", "3"],
    "n1-[1-2]": ["n1-1", "n1-2"],
    "": [],
}


@pytest.mark.parametrize(("text", "names"), EXPANDED.items())
def test_a_list_expands_as_slurm_does_it(text: str, names: list[str]) -> None:
    assert expand(text) == names


@pytest.mark.parametrize(("text", "names"), FOLDED.items())
def test_names_fold_as_slurm_does_it(text: str, names: list[str]) -> None:
    assert fold(names) == text


@pytest.mark.parametrize(
    "text", ["n[3-1]", "n[a]", "n[]", "n[1,]", "n[1--2]", "n[ 1-2 ]", "n[1-70000]", "n[1-2]]", "n[1-2"]
)
def test_what_slurm_does_not_take_is_refused_with_the_list_in_the_message(text: str) -> None:
    with pytest.raises(NodelistError) as caught:
        expand(text)
    assert repr(text) in str(caught.value)


def test_a_name_without_a_number_does_not_spoil_the_fold_beside_it() -> None:
    assert fold(["b12", "b13", "b34", "b", "b", "b7"]) == "b[12-13,34],b,b,b7"
