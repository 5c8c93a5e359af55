"""What people see: commands, tables, progress.  No arithmetic."""
