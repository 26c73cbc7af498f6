"""Which Penstock this is. Imports nothing, and packaging reads the version without importing it."""

__version__ = "1.0.0rc1"

NAMESAKE = (
    "Two projects have the import name penstock, and both are or were installed in this environment: this one, "
    "penstock-data, and an unrelated one called penstock. Each overwrites files of the other, and removing one breaks "
    "the other. To keep this one: pip uninstall penstock, then pip install --force-reinstall --no-deps penstock-data."
)
"""Where the other project was installed first, `import penstock` warns. Where it was last, `__init__.py` is theirs, and
nothing of ours runs before the command `penstock`, which then ends with this."""
