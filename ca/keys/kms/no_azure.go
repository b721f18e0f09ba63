//go:build !azurekms

package kms

import "context"

func openAzure(context.Context, *URI) (service, error) { return nil, notBuilt("azurekms") }
