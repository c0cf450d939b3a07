"""Beyond one machine: encoders on other machines, and jobs and trainings on a Ray cluster.

The only room that knows Ray, which is the extra ``sd-lightning[ray]``.
"""
