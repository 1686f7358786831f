"""A layout of a model as it runs: its calls, where the tokens lie, and digests of what every op reads and writes"""
