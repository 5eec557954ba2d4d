from pathlib import Path

import pytest
import yaml

from dbt_llm.errors import ConfigError
from dbt_llm.project_setup import IS_INCREMENTAL, set_up, write

PACKAGE = Path("/opt/it's/dbt_llm/include")
PLAIN = """\
# My project; do not touch.
name:   'shop'
profile: shop_profile
models:
    shop:
        +materialized: table   # all of them
"""


@pytest.fixture
def project(tmp_path):
    def make(text=PLAIN, packages=None):
        (tmp_path / "dbt_project.yml").write_text(text)
        if packages is not None:
            (tmp_path / "packages.yml").write_text(packages)
        return tmp_path

    return make


def after(folder):
    changes, profile = set_up(folder, Path("/opt/dbt_llm/include"))
    write(changes)
    return (
        (folder / "dbt_project.yml").read_text(),
        (folder / "packages.yml").read_text(),
        profile,
    )


def removed(text, lines):
    return "".join(line for line in text.splitlines(keepends=True) if line not in lines)


def test_a_plain_project_gets_the_block_and_the_package(project):
    text, packages, profile = after(project())
    assert text.startswith(PLAIN)
    assert yaml.safe_load(text)["dispatch"] == [
        {"macro_namespace": "dbt", "search_order": ["shop", "dbt_llm", "dbt"]}
    ]
    assert yaml.safe_load(packages) == {"packages": [{"local": "/opt/dbt_llm/include"}]}
    assert list(yaml.safe_load(profile)) == ["shop_profile"]


def test_ends_of_lines_stay_what_they_are(project):
    folder = project()
    for name, text in (("dbt_project", PLAIN), ("packages", "packages:\n  - package: a/b\n")):
        (folder / f"{name}.yml").write_bytes(text.replace("\n", "\r\n").encode())
    after(folder)
    for name in ("dbt_project", "packages"):
        written = (folder / f"{name}.yml").read_bytes()
        assert written.count(b"\r\n") == written.count(b"\n") > 2
        assert "dbt_llm" in str(yaml.safe_load(written))


def test_a_list_of_packages_that_is_a_comment_stays(project):
    before = "# packages:\n#   - package: dbt-labs/dbt_utils\n"
    _, packages, _ = after(project(packages=before))
    assert packages.startswith(before)
    assert yaml.safe_load(packages) == {"packages": [{"local": "/opt/dbt_llm/include"}]}


def test_a_folder_with_an_apostrophe(project):
    folder = project()
    changes, _ = set_up(folder, PACKAGE)
    write(changes)
    written = yaml.safe_load((folder / "packages.yml").read_text())
    assert written == {"packages": [{"local": str(PACKAGE)}]}


@pytest.mark.parametrize(
    ("where", "known"),
    [
        ("/home/me/dbt-llm", True),
        ("../dbt_llm/include", True),
        ("https://example.com/x/dbt-llm.git", True),
        ("/home/me/dbt-llm-demo/shared", False),
    ],
)
def test_a_package_is_known_by_its_name(project, where, known):
    folder = project(packages=f"packages:\n  - local: {where}\n")
    _, packages, _ = after(folder)
    assert len(yaml.safe_load(packages)["packages"]) == (1 if known else 2)


@pytest.mark.parametrize(
    ("text", "packages"),
    [
        ("{name: shop, profile: shop}\n", None),
        ("  name: shop\n  profile: shop\n", None),
        (PLAIN, "packages: []  # none yet\n"),
    ],
)
def test_what_cannot_be_changed_without_harm_is_left_alone(project, text, packages):
    folder = project(text, packages)
    with pytest.raises(ConfigError, match=r"by hand|Put"):
        set_up(folder, PACKAGE)


def test_a_second_time_changes_nothing(project):
    folder = project()
    first = after(folder)
    assert after(folder) == first


@pytest.mark.parametrize(
    "order",
    [
        "search_order: ['shop', 'dbt']  # mine first",
        'search_order: [ "dbt" ]',
        "search_order:\n      - shop  # mine\n      # then dbt\n      - dbt",
        "search_order:\n    - shop\n    - dbt\n",
    ],
)
def test_a_search_order_that_is_there_gets_one_item_more(project, order):
    before = f"{PLAIN}dispatch:\n  - macro_namespace: other\n    search_order: [a]\n" + (
        f"  - macro_namespace: dbt\n    {order}\nvars: {{a: 1}}\n"
    )
    text, _, _ = after(project(before))
    expected = yaml.safe_load(before)
    found = expected["dispatch"][1]["search_order"]
    found.insert(found.index("dbt"), "dbt_llm")
    assert yaml.safe_load(text) == expected
    inserted = text.replace("'dbt_llm', ", "", 1)
    if inserted == text:
        inserted = removed(text, ["      - dbt_llm\n", "    - dbt_llm\n"])
    assert inserted == before


def test_a_dispatch_of_another_namespace_stays(project):
    before = f"{PLAIN}dispatch:\n  - macro_namespace: other  # mine\n    search_order: [a]\n"
    text, _, _ = after(project(before))
    assert yaml.safe_load(text)["dispatch"] == [
        {"macro_namespace": "dbt", "search_order": ["shop", "dbt_llm", "dbt"]},
        {"macro_namespace": "other", "search_order": ["a"]},
    ]
    added = ["  - macro_namespace: dbt\n", "    search_order: ['shop', 'dbt_llm', 'dbt']\n"]
    assert removed(text, added) == before


@pytest.mark.parametrize(
    "packages",
    [
        "packages:\n  - package: dbt-labs/dbt_utils  # for keys\n    version: 1.3.0\n",
        "# all\npackages:\n- git: https://example.org/a.git\n  revision: x\n",
    ],
)
def test_other_packages_stay(project, packages):
    _, text, _ = after(project(packages=packages))
    before, now = yaml.safe_load(packages)["packages"], yaml.safe_load(text)["packages"]
    assert now == [{"local": "/opt/dbt_llm/include"}, *before]
    assert removed(text, [f"{i}- local: '/opt/dbt_llm/include'\n" for i in ("", "  ")]) == packages


def test_a_package_that_is_there_is_left(project):
    packages = "packages:\n  - local: ../dbt-llm\n"
    assert after(project(packages=packages))[1] == packages


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("profile: x\n", "has no name"),
        ("name: [\n", "is no YAML"),
        (
            "name: x\ndispatch:\n  - {macro_namespace: dbt, search_order: [dbt, dbt_llm]}\n",
            "by hand",
        ),
        ("name: x\ndispatch: [{macro_namespace: other, search_order: [x]}]\n", "by hand"),
    ],
)
def test_what_cannot_be_done_is_said_and_nothing_written(project, text, words):
    folder = project(text)
    with pytest.raises(ConfigError, match=words):
        set_up(folder, PACKAGE)
    assert (folder / "dbt_project.yml").read_text() == text


def test_a_folder_without_a_project_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="Run this in a dbt project"):
        set_up(tmp_path, PACKAGE)


def test_the_macro_is_incremental_is_written_where_macros_are(project):
    folder = project(f"{PLAIN}macro-paths: [my macros, macros]\n")
    after(folder)
    assert (folder / "my macros" / "is_incremental.sql").read_text() == IS_INCREMENTAL
    changes, _ = set_up(folder, PACKAGE)
    assert (changes[-1].text, changes[-1].words) == (
        None,
        "the macro is_incremental is there already",
    )


def test_a_macro_is_incremental_of_the_users_stays(project):
    folder = project()
    own = folder / "macros" / "deep" / "own.sql"
    own.parent.mkdir(parents=True)
    own.write_text("{%- macro  is_incremental () -%}{{ return(false) }}{%- endmacro -%}")
    changes, _ = set_up(folder, PACKAGE)
    assert (changes[-1].path, changes[-1].text) == (own, None)
    assert "have it call dbt_llm.is_incremental()" in changes[-1].words


def test_a_file_of_the_name_that_holds_something_else_stays(project):
    folder = project()
    (folder / "macros").mkdir()
    (folder / "macros" / "is_incremental.sql").write_text("{# nothing #}")
    after(folder)
    assert (folder / "macros" / "is_incremental.sql").read_text() == "{# nothing #}"
    assert (folder / "macros" / "dbt_llm_is_incremental.sql").read_text() == IS_INCREMENTAL
