"""The `macko` command: one module per subcommand. It parses arguments, calls a public function and prints the result.

A module has HELP, add_arguments(parser) and run(args), which returns the exit code. Modules here may import every other
package; no other package imports them.
"""
