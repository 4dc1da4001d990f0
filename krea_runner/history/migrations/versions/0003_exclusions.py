"""exclusions: nodes on which a run, or every run of a user, is not to be placed"""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    op.create_table(
        "exclusions",
        sa.Column("exclusion_id", sa.Integer, primary_key=True),
        sa.Column("run_id", sa.Integer, sa.ForeignKey("runs.run_id")),
        sa.Column("user", sa.Text, nullable=False),
        sa.Column("node", sa.Text, nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("evidence", sa.Text, nullable=False, server_default=""),
        sa.Column("who", sa.Text, nullable=False),
        sa.Column("created_at", sa.Float, nullable=False),
        sa.Column("expires_at", sa.Float),
    )
