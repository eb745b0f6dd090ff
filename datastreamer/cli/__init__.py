"""The command line: `verbs` has one file per command, `shared` what they have in common."""
