"""What measures and proves: audits, benchmarks, recorded answers, and the reports of all of
them.
"""
