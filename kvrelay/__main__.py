"""`python -m kvrelay`: the command line of a checkout that nothing installed."""

from cli.main import main

main()
