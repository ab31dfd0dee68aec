"""The archdef language: syntax, op table, checker, binding; and the definitions. Knows no arrays."""
