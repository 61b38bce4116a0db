"""One file per task: prompts and a grader."""
