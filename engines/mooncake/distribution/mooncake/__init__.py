"""kvstore under Mooncake's package name: see kvstore.engines.mooncake. Do not install it beside Mooncake's own
package."""
