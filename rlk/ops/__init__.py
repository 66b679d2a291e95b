"""The operators: one file each, every file with its rule, its plain `reference` and its backends."""
