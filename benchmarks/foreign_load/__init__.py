"""Load generators of other projects against kvrelay's HTTP door, and ours beside them.

    python -m benchmarks.foreign_load --out DIR [--tools guidellm,aiperf] [--engine fake] [--rounds 3]

Method. kvrelay serves SmolLM2 as 1P1D (launcher local). Each tool gets an environment of its own, made once, and runs
without a network: the tokenizer is the served model's folder. All of them, `kvrelay bench`'s generator too, ask chats
of equal lengths as a closed loop of N users, streaming, end-of-text ignored; they take turns, backwards in every
other round.

Checked, and a failure ends the command with 1: that the tool's own report counts every request as answered and none as
failed, and that its token counts are those that were asked for. Shown: what each tool says of first tokens and of the
gaps between tokens, and whether the tools agree, which they do when the ranges of their medians over the rounds meet.
On a machine whose cores compute the model as well, a tool that computes more makes the server slower, and is right to
say so; `--engine fake` serves with steps of 20 ms that need no core, and shows what is left of such differences.

DIR keeps the tools' own reports and logs.
"""
