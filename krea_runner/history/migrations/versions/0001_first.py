"""runs, attempts, incidents, actions, ticks"""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    op.create_table(
        "runs",
        sa.Column("run_id", sa.Integer, primary_key=True),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("user", sa.Text, nullable=False),
        sa.Column("run_dir", sa.Text, nullable=False),
        sa.Column("config", sa.Text, nullable=False),
        sa.Column("state", sa.Text, nullable=False),
        sa.Column("state_reason", sa.Text, nullable=False),
        sa.Column("job_id", sa.Text),
        sa.Column("tag", sa.Text, nullable=False, unique=True),
        sa.Column("created_at", sa.Float, nullable=False),
        sa.Column("updated_at", sa.Float, nullable=False),
        sa.Column("lease_holder", sa.Text),
        sa.Column("lease_until", sa.Float),
        sa.Column("lease_generation", sa.Integer, nullable=False, server_default="0"),
    )
    op.create_index(
        "one_live_run_a_directory",
        "runs",
        ["run_dir"],
        unique=True,
        sqlite_where=sa.text("state IN ('SUBMITTING', 'ACTIVE', 'HELD')"),
    )
    op.create_table(
        "attempts",
        sa.Column("attempt_id", sa.Integer, primary_key=True),
        sa.Column("run_id", sa.Integer, sa.ForeignKey("runs.run_id"), nullable=False),
        sa.Column("job_id", sa.Text, nullable=False),
        sa.Column("restart_count", sa.Integer, nullable=False),
        sa.Column("relaunch", sa.Integer, nullable=False),
        sa.Column("first_seen_at", sa.Float, nullable=False),
        sa.Column("started_at", sa.Float),
        sa.Column("ended_at", sa.Float),
        sa.Column("end_state", sa.Text),
        sa.Column("exit_code", sa.Integer),
        sa.Column("signal", sa.Integer),
        sa.Column("nodelist", sa.Text, nullable=False, server_default=""),
        sa.Column("first_step", sa.Integer),
        sa.Column("last_step", sa.Integer),
        sa.Column("watch", sa.Text),
        sa.UniqueConstraint("run_id", "job_id", "restart_count", "relaunch", name="one_row_an_attempt"),
    )
    op.create_table(
        "incidents",
        sa.Column("incident_id", sa.Integer, primary_key=True),
        sa.Column("run_id", sa.Integer, sa.ForeignKey("runs.run_id"), nullable=False),
        sa.Column("attempt_id", sa.Integer, sa.ForeignKey("attempts.attempt_id"), nullable=False, unique=True),
        sa.Column("symptom", sa.Text, nullable=False),
        sa.Column("cause", sa.Text, nullable=False),
        sa.Column("summary", sa.Text, nullable=False),
        sa.Column("node", sa.Text, nullable=False),
        sa.Column("step", sa.Integer),
        sa.Column("last_progress_at", sa.Float),
        sa.Column("evidence", sa.Text, nullable=False),
        sa.Column("suspects", sa.Text, nullable=False),
        sa.Column("agreed_by", sa.Text, nullable=False),
        sa.Column("checkpoint_step", sa.Integer),
        sa.Column("noticed_at", sa.Float, nullable=False),
        sa.Column("decision", sa.Text, nullable=False),
        sa.Column("decision_reason", sa.Text, nullable=False),
        sa.Column("restarted_at", sa.Float),
        sa.Column("resumed_at", sa.Float),
        sa.Column("resumed_step", sa.Integer),
    )
    op.create_index("incidents_by_run", "incidents", ["run_id", "noticed_at"])
    op.create_table(
        "actions",
        sa.Column("action_id", sa.Integer, primary_key=True),
        sa.Column("run_id", sa.Integer, sa.ForeignKey("runs.run_id"), nullable=False),
        sa.Column("incident_id", sa.Integer, sa.ForeignKey("incidents.incident_id")),
        sa.Column("kind", sa.Text, nullable=False),
        sa.Column("stage", sa.Text, nullable=False),
        sa.Column("job_id", sa.Text, nullable=False),
        sa.Column("restart_count", sa.Integer, nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("by", sa.Text, nullable=False),
        sa.Column("detail", sa.Text, nullable=False, server_default=""),
        sa.Column("created_at", sa.Float, nullable=False),
        sa.Column("updated_at", sa.Float, nullable=False),
    )
    op.create_index(
        "one_open_action_a_run",
        "actions",
        ["run_id"],
        unique=True,
        sqlite_where=sa.text("stage NOT IN ('DONE', 'FAILED')"),
    )
    op.create_table(
        "ticks",
        sa.Column("host", sa.Text, primary_key=True),
        sa.Column("user", sa.Text, primary_key=True),
        sa.Column("at", sa.Float, nullable=False),
        sa.Column("blind", sa.Text, nullable=False),
    )
