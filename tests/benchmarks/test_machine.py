"""The machine that a table of measurements names."""

import pytest

from benchmarks.machine import processor_name

CPUINFO = (
    'processor\t: 0\nvendor_id\t: {vendor}\ncpu family\t: {family}\nmodel\t\t: {model}\n'
    'model name\t: {name}\n\nprocessor\t: 1\nmodel name\t: another\n'
)
SAPPHIRE_RAPIDS = 'Intel Xeon Platinum 8480+ (Sapphire Rapids)'


@pytest.mark.parametrize(
    ('vendor', 'family', 'model', 'name', 'shown'),
    [
        ('AuthenticAMD', 26, 2, 'AMD EPYC', 'AMD EPYC (Zen 5)'),
        ('AuthenticAMD', 25, 17, 'AMD EPYC', 'AMD EPYC (Zen 4)'),
        ('AuthenticAMD', 25, 1, 'AMD EPYC', 'AMD EPYC (Zen 3)'),
        ('AuthenticAMD', 23, 49, 'AMD EPYC', 'AMD EPYC, cpu family 23, model 49'),  # Zen 2
        ('AuthenticAMD', 26, 80, 'AMD EPYC', 'AMD EPYC, cpu family 26, model 80'),  # newer
        ('GenuineIntel', 6, 143, 'Intel(R) Xeon(R) Platinum 8480+', SAPPHIRE_RAPIDS),
        (
            'GenuineIntel',
            6,
            207,
            'Intel(R) Xeon(R) Processor',
            'Intel Xeon Processor (Emerald Rapids)',
        ),
        ('GenuineIntel', 6, 85, 'Intel Xeon', 'Intel Xeon, cpu family 6, model 85'),  # of two kinds
    ],
)
def test_a_processor_has_the_name_that_readers_know(vendor, family, model, name, shown):
    text = CPUINFO.format(vendor=vendor, family=family, model=model, name=name)
    assert processor_name(text) == shown


def test_numbers_that_do_not_fit_what_it_can_do():
    text = CPUINFO.format(vendor='GenuineIntel', family=6, model=167, name='Intel(R) Xeon(R)')
    text = text.replace('model name', 'flags\t\t: fpu amx_tile\nmodel name', 1)
    assert processor_name(text) == 'Intel Xeon, cpu family 6, model 167, with AMX'


def test_a_processor_without_numbers():
    assert processor_name('model name\t: Cortex-A76\n') == 'Cortex-A76'
