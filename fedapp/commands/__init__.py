"""The `fedapp` command: a module a subcommand."""
