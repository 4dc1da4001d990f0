"""Alembic's entry: runs on the connection, and inside the transaction, that store.py hands over."""

from alembic import context

from krea_runner.history.schema import metadata

connection = context.config.attributes["connection"]
context.configure(connection=connection, target_metadata=metadata, render_as_batch=True)
context.run_migrations()
