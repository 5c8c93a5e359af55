"""The command line: commands, tables and progress bars, without arithmetic."""
