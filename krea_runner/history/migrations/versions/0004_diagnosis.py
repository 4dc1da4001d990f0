"""incidents: what the logs say did it"""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    op.add_column("incidents", sa.Column("diagnosis", sa.Text))
