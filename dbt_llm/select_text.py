"""Reads the SELECTs of a query from its tokens, so that its text can be edited in place."""

from dataclasses import dataclass

import sqlglot
from sqlglot import TokenType as T

from dbt_llm.functions import FUNCTIONS

CALLS = {function.name for function in FUNCTIONS if function.columns}
_OPEN = {T.L_PAREN, T.L_BRACKET, T.L_BRACE}
_CLOSE = {T.R_PAREN, T.R_BRACKET, T.R_BRACE}
_SETS = {T.UNION, T.INTERSECT, T.EXCEPT}
_CLAUSES = {
    **{T.FROM: "from", T.WHERE: "where", T.GROUP_BY: "group", T.HAVING: "having"},
    **{T.WINDOW: "window", T.QUALIFY: "qualify", T.ORDER_BY: "order", T.LIMIT: "limit"},
    **{T.OFFSET: "offset", T.FETCH: "fetch", T.USING: "using"},
}
_TAIL = ("order", "limit", "offset", "fetch")
CUTTING = {"limit", "offset", "fetch", "distinct on"}


def may_call(query: str) -> bool:
    """Tell whether a query's text names a function that asks an LLM."""
    lower = query.lower()
    return any(name in lower for name in CALLS)


@dataclass
class Select:
    """One SELECT: its tokens, its list, and the tokens of its clauses by name."""

    begin: int
    end: int
    first: int
    list_end: int
    in_set: bool
    clauses: dict[str, tuple[int, int]]
    items: list[tuple[int, int]]


class Query:
    """A query's tokens, with the brackets and SELECTs among them."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens = sqlglot.tokenize(text, dialect="duckdb")
        self.parent: list[int] = []
        self.close = {-1: len(self.tokens)}
        stack = [-1]
        for i, token in enumerate(self.tokens):
            if token.token_type in _CLOSE:
                self.close[stack.pop()] = i
            self.parent.append(stack[-1])
            if token.token_type in _OPEN:
                stack.append(i)
        self.cuts_of_sets: list[tuple[int, int]] = []
        self.selects = [
            self._select(i) for i in range(len(self.tokens)) if self.type(i) is T.SELECT
        ]
        for i, token in enumerate(self.tokens):
            inside = any(
                s.begin <= i < s.end and self.parent[i] == self.parent[s.first]
                for s in self.selects
            )
            if token.token_type in {T.LIMIT, T.OFFSET} and self.clause(i) and not inside:
                self.cuts_of_sets.append((self.parent[i] + 1, i))

    def type(self, i: int) -> T | None:
        """Return the type of token i, None beyond the text."""
        return self.tokens[i].token_type if 0 <= i < len(self.tokens) else None

    def word(self, i: int) -> str:
        """Return token i in lower case, nothing beyond the text."""
        return self.tokens[i].text.lower() if 0 <= i < len(self.tokens) else ""

    def span(self, begin: int, end: int) -> str:
        """Return the text of some tokens."""
        if begin >= end:
            return ""
        return self.text[self.tokens[begin].start : self.tokens[end - 1].end + 1]

    def replace(self, begin: int, end: int, text: str) -> str:
        """Return the whole text with some tokens replaced."""
        tail = self.text[self.tokens[end - 1].end + 1 :]
        return self.text[: self.tokens[begin].start] + text + tail

    def function(self, i: int) -> str | None:
        """Return the name of the function whose name is token i."""
        is_name = self.tokens[i].text and self.type(i) not in {T.STRING, *_OPEN, *_CLOSE}
        return self.word(i) if is_name and self.type(i + 1) is T.L_PAREN else None

    def calls(self, spans: list[tuple[int, int]]) -> list[int]:
        """Return the tokens at which a call begins."""
        return [i for a, b in spans for i in range(a, b) if self.function(i) in CALLS]

    def clause(self, i: int) -> str | None:
        """Return the clause that token i opens."""
        before = self.type(i - 1)
        if before in {T.DOT, T.ALIAS} or (self.type(i) is T.FROM and before is T.DISTINCT):
            return None
        if self.type(i) is T.USING and self.word(i + 1) != "sample":
            return None
        token = self.type(i)
        return _CLAUSES.get(token) if token is not None else None

    def split(self, begin: int, end: int) -> list[tuple[int, int]]:
        """Split tokens at the commas that stand in no further brackets."""
        level = self.parent[begin] if begin < end else -1
        commas = [
            i for i in range(begin, end) if self.type(i) is T.COMMA and self.parent[i] == level
        ]
        edges = zip([begin, *(i + 1 for i in commas)], [*commas, end], strict=True)
        return [(a, b) for a, b in edges if a < b]

    def _select(self, first: int) -> Select:
        level = self.parent[first]
        group = [i for i in range(level + 1, self.close[level]) if self.parent[i] == level]
        sets = [i for i in group if self.type(i) in _SETS]
        ends = [i for i in group if i > first and self.type(i) in {*_SETS, T.SEMICOLON}]
        end = min(ends, default=self.close[level])
        opened = max((i for i in sets if i < first), default=level)
        froms = [i for i in group if opened < i < first and self.clause(i) == "from"]
        begin = froms[0] if froms else first
        opens = [(i, c) for i in group if first < i < end and (c := self.clause(i))]
        if sets:
            tails = [i for i, clause in opens if clause in _TAIL]
            end = min(tails, default=end)
            opens = [(i, clause) for i, clause in opens if i < end]
        edges = [*(i for i, _ in opens), end]
        clauses = {c: (i, edges[n + 1]) for n, (i, c) in enumerate(opens)}
        if froms:
            clauses["from"] = (begin, first)
        list_begin = first + 1
        if self.type(list_begin) is T.DISTINCT:
            has_on = self.type(first + 2) is T.ON
            list_begin = self.close[first + 3] + 1 if has_on else first + 2
            clauses["distinct on" if has_on else "distinct"] = (first + 1, list_begin)
        items = self.split(list_begin, edges[0])
        return Select(begin, end, first, edges[0], bool(sets), clauses, items)

    def names(self, name: str, begin: int, end: int) -> bool:
        """Whether some tokens mention a name that no table's name stands before."""
        return any(
            self.word(i) == name.lower()
            and self.type(i) is not T.STRING
            and self.type(i - 1) is not T.DOT
            and self.type(i + 1) not in {T.L_PAREN, T.COLON_EQ}
            for i in range(begin, end)
        )

    def edited(self, begin: int, end: int, edits: dict[tuple[int, int], str]) -> str:
        """Return the text of some tokens with parts of it replaced."""
        if begin >= end:
            return ""
        text, at = "", self.tokens[begin].start
        for (a, b), new in sorted(edits.items()):
            if begin <= a and b <= end:
                text += self.text[at : self.tokens[a].start] + new
                at = self.tokens[b - 1].end + 1
        return text + self.text[at : self.tokens[end - 1].end + 1]

    def in_expression(self, select: Select) -> bool:
        """Whether a SELECT is an operand, which may run once per row of the query around it."""
        level = self.parent[select.first]
        while level != -1:
            around = self.parent[level]
            for other in self.selects:
                same = self.parent[other.first] == around and other.begin <= level < other.end
                begin, end = other.clauses.get("from", (0, 0))
                if same and not begin <= level < end:
                    return True
            level = around
        return False

    def callers(self, begin: int, end: int) -> list[Select]:
        """Return the SELECTs with calls and no cut of their own in some tokens and their CTEs."""
        ctes = self.ctes()
        seen: set[int] = set()
        spans = [(begin, end)]
        for a, b in spans:
            for i in range(a, b):
                opened = ctes.get(self.word(i)) if self.type(i - 1) is not T.DOT else None
                if opened is not None and opened not in seen:
                    seen.add(opened)
                    spans.append((opened, self.close[opened]))
        return [
            select
            for select in self.selects
            if any(a <= select.begin < b for a, b in spans)
            and self.word(select.end - 1) != "dbt_llm_o"
            and not CUTTING & select.clauses.keys()
            and self.calls(select.items)
        ]

    def ctes(self) -> dict[str, int]:
        """Return the bracket that opens each CTE, by its name."""
        found = {}
        for i in range(len(self.tokens) - 2):
            j = i + 2 + sum(self.word(k) in {"not", "materialized"} for k in (i + 2, i + 3))
            after = self.type(i - 1) in {T.WITH, T.RECURSIVE, T.COMMA}
            if after and self.type(i + 1) is T.ALIAS and self.type(j) is T.L_PAREN:
                found[self.word(i)] = j
        return found

    def used_once(self, i: int) -> bool:
        """Whether the CTE named by token i is read only there."""
        places = (k for k in range(len(self.tokens)) if self.type(k + 1) is not T.DOT)
        return sum(self.names(self.word(i), k, k + 1) for k in places) == 2
