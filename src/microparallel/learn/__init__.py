"""Teach: the exercises of the course, where a learner's work is kept, and who checks it.

```
runner (the command line)      no torch, never runs a learner's code; ends what takes too long
   └── referee                 a process of its own: asks the exercise's grader
         └── ranks             where the learner's code runs, with a Comms that watches what it does
```
"""
