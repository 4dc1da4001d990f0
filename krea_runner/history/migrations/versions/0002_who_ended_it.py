"""attempts: submission time, end node, who ended it; incidents: who did it"""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    op.add_column("attempts", sa.Column("submitted_at", sa.Float))
    op.add_column("attempts", sa.Column("end_node", sa.Text, nullable=False, server_default=""))
    op.add_column("attempts", sa.Column("ended_by", sa.Text, nullable=False, server_default=""))
    op.add_column("incidents", sa.Column("by", sa.Text, nullable=False, server_default=""))
