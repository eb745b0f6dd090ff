"""How commands are made of functions: options, groups, files of options."""
