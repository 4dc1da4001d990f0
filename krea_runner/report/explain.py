"""The tables of `krea-runner explain`. Pure."""

from krea_runner.diagnose.explain import Explanation
from krea_runner.report.tables import Column, Note, Row, Sheet
from krea_runner.report.words import one_line, seconds


def rules_sheet(explanation: Explanation) -> Sheet:
    columns = (
        Column("RULE", short=True), Column("VALUE", right=True, short=True), Column("BUDGET", right=True, short=True),
        Column("LEFT", right=True, short=True), Column("BLOCKED BY"), Column("WHY"),
    )  # fmt: skip
    rows = []
    for rule in explanation.rules:
        left = seconds(max(0.0, rule.left_s)) if rule.left_s is not None else "-"
        why, blocked = one_line(rule.why), one_line(rule.blocked_by)
        notes = [Note(why), *([Note(f"blocked by: {blocked}")] if blocked else [])]
        cells = (one_line(rule.rule), seconds(rule.value_s), seconds(rule.budget_s), left, blocked or "-", why)
        rows.append(Row(cells, notes=tuple(notes)))
    return Sheet(columns, tuple(rows))


def budgets_sheet(explanation: Explanation) -> Sheet:
    columns = (
        Column("PHASE", short=True), Column("BUDGET", right=True, short=True), Column("WAITS", right=True, short=True),
        Column("USUAL", right=True, short=True), Column("19 OF 20", right=True, short=True),
        Column("LONGEST", right=True, short=True), Column("WHY"),
    )  # fmt: skip
    rows = [
        Row(
            (one_line(one.phase), seconds(one.budget_s), str(one.waits), seconds(one.usual_s), seconds(one.most_s),
             seconds(one.longest_s), one_line(one.why)),
            notes=(Note(one_line(one.why)),) if one.waits else (),
        )
        for one in explanation.budgets
    ]  # fmt: skip
    return Sheet(columns, tuple(rows))
