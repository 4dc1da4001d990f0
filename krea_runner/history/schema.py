"""The tables of history.db (SQLAlchemy Core). Times are seconds since the epoch; JSON is text.

A change here needs a migration in migrations/versions/ and the new HEAD below; a test holds the two together.
"""

from sqlalchemy import (
    Column,
    Float,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    Table,
    Text,
    UniqueConstraint,
    text,
)

HEAD = "0005"

metadata = MetaData()

runs = Table(
    "runs",
    metadata,
    Column("run_id", Integer, primary_key=True),
    Column("name", Text, nullable=False),
    Column("user", Text, nullable=False),
    Column("run_dir", Text, nullable=False),
    Column("config", Text, nullable=False),
    Column("state", Text, nullable=False),
    Column("state_reason", Text, nullable=False),
    Column("job_id", Text),
    Column("tag", Text, nullable=False, unique=True),
    Column("created_at", Float, nullable=False),
    Column("updated_at", Float, nullable=False),
    # The lease: who may act on this run, until when; the generation fences a holder that woke up too late.
    Column("lease_holder", Text),
    Column("lease_until", Float),
    Column("lease_generation", Integer, nullable=False, server_default="0"),
    Index(
        "one_live_run_a_directory",
        "run_dir",
        unique=True,
        sqlite_where=text("state IN ('SUBMITTING', 'ACTIVE', 'HELD')"),
    ),
)

attempts = Table(
    "attempts",
    metadata,
    Column("attempt_id", Integer, primary_key=True),
    Column("run_id", Integer, ForeignKey("runs.run_id"), nullable=False),
    Column("job_id", Text, nullable=False),
    Column("restart_count", Integer, nullable=False),
    Column("relaunch", Integer, nullable=False),
    Column("first_seen_at", Float, nullable=False),
    Column("started_at", Float),
    Column("ended_at", Float),
    Column("end_state", Text),
    Column("exit_code", Integer),
    Column("signal", Integer),
    Column("nodelist", Text, nullable=False, server_default=""),
    Column("first_step", Integer),
    Column("last_step", Integer),
    Column("watch", Text),
    Column("submitted_at", Float),
    Column("end_node", Text, nullable=False, server_default=""),
    Column("ended_by", Text, nullable=False, server_default=""),
    UniqueConstraint("run_id", "job_id", "restart_count", "relaunch", name="one_row_an_attempt"),
)

incidents = Table(
    "incidents",
    metadata,
    Column("incident_id", Integer, primary_key=True),
    Column("run_id", Integer, ForeignKey("runs.run_id"), nullable=False),
    Column("attempt_id", Integer, ForeignKey("attempts.attempt_id"), nullable=False, unique=True),
    Column("symptom", Text, nullable=False),
    Column("cause", Text, nullable=False),
    Column("summary", Text, nullable=False),
    Column("node", Text, nullable=False),
    Column("step", Integer),
    Column("last_progress_at", Float),
    Column("evidence", Text, nullable=False),
    Column("suspects", Text, nullable=False),
    Column("agreed_by", Text, nullable=False),
    Column("checkpoint_step", Integer),
    Column("noticed_at", Float, nullable=False),
    Column("decision", Text, nullable=False),
    Column("decision_reason", Text, nullable=False),
    Column("restarted_at", Float),
    Column("resumed_at", Float),
    Column("resumed_step", Integer),
    Column("by", Text, nullable=False, server_default=""),
    Column("diagnosis", Text),
    Index("incidents_by_run", "run_id", "noticed_at"),
)

actions = Table(
    "actions",
    metadata,
    Column("action_id", Integer, primary_key=True),
    Column("run_id", Integer, ForeignKey("runs.run_id"), nullable=False),
    Column("incident_id", Integer, ForeignKey("incidents.incident_id")),
    Column("kind", Text, nullable=False),
    Column("stage", Text, nullable=False),
    Column("job_id", Text, nullable=False),
    Column("restart_count", Integer, nullable=False),
    Column("reason", Text, nullable=False),
    Column("by", Text, nullable=False),
    Column("detail", Text, nullable=False, server_default=""),
    Column("created_at", Float, nullable=False),
    Column("updated_at", Float, nullable=False),
    Index(
        "one_open_action_a_run",
        "run_id",
        unique=True,
        sqlite_where=text("stage NOT IN ('DONE', 'FAILED')"),
    ),
)

# One row a host: when its supervisor last looked, and whether it could see.
ticks = Table(
    "ticks",
    metadata,
    Column("host", Text, primary_key=True),
    Column("user", Text, primary_key=True),
    Column("at", Float, nullable=False),
    Column("blind", Text, nullable=False),
)

# Nodes to keep off. Without a run: every run of that user. Never deleted: what was ours on a job must be told from the
# user's own for ever. One that was taken back has expired.
exclusions = Table(
    "exclusions",
    metadata,
    Column("exclusion_id", Integer, primary_key=True),
    Column("run_id", Integer, ForeignKey("runs.run_id")),
    Column("user", Text, nullable=False),
    Column("node", Text, nullable=False),
    Column("reason", Text, nullable=False),
    Column("evidence", Text, nullable=False, server_default=""),
    Column("who", Text, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("expires_at", Float),
)

# One row an episode; without `ended_at` it goes on.
warnings = Table(
    "warnings",
    metadata,
    Column("warning_id", Integer, primary_key=True),
    Column("run_id", Integer, ForeignKey("runs.run_id"), nullable=False),
    Column("attempt", Text, nullable=False),
    Column("kind", Text, nullable=False),
    Column("text", Text, nullable=False),
    Column("began_at", Float, nullable=False),
    Column("ended_at", Float),
    Index("warnings_by_run", "run_id"),
)
