"""What is public is a list."""

import types

import meshdp
import meshdp.testing


def public(module):
    return sorted(
        (
            name
            for name, value in vars(module).items()
            if not name.startswith("_") and not isinstance(value, types.ModuleType)
        ),
        key=lambda name: (name.casefold(), name),
    )


def test_all_lists_exactly_the_public_names():
    assert meshdp.__all__ == public(meshdp)


def test_report_is_the_function_and_its_package_can_be_imported_from():
    from meshdp.report import Report, report

    assert meshdp.report is report
    assert meshdp.Report is Report
