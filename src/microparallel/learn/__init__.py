"""Teach: the exercises of the course, the folder with a learner's work, and how an answer is checked.

```
the command line      checking.py            no torch, never runs a learner's code; ends what takes too long
 └── a process        referee.py, graders/   asks the exercise's grader, which asks an Exam (exam.py)
       └── a process  sandbox.py             refuses what the exercise is about, and what would harm the machine
             └── a thread a rank  ranks.py   runs the learner's code; log.py writes down what it does
```
"""
