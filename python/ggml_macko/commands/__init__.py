"""The `macko` command: one module per subcommand, which parses, calls a public function of the package and prints.

A module has HELP, add_arguments(parser) and run(args), which returns the exit code. Modules here may import every other
package and are imported by none.
"""
