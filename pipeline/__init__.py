"""The orchestrator: recipe, plan, runner, command line and report. Never imports torch."""
