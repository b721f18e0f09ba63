package kube

import (
	"context"
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
)

// Bounds on how often a key that somebody takes is taken back.
const (
	mostHeals  = 3
	healWindow = 10 * time.Minute
	// forcedPause is how long a forced publisher waits between two such rounds.
	forcedPause = time.Minute
)

// applied is what server-side apply needs of an object; fields that are not ours are not in it.
type applied struct {
	APIVersion string            `json:"apiVersion"`
	Kind       string            `json:"kind"`
	Metadata   metadata          `json:"metadata"`
	Spec       *bundleSpec       `json:"spec,omitempty"`
	Data       map[string]string `json:"data,omitempty"`
}

type metadata struct {
	Namespace   string            `json:"namespace,omitempty"`
	Name        string            `json:"name"`
	Labels      map[string]string `json:"labels,omitempty"`
	Annotations map[string]string `json:"annotations,omitempty"`
}

type bundleSpec struct {
	SignerName  string `json:"signerName"`
	TrustBundle string `json:"trustBundle"`
}

// apply writes our fields of an object, which is made if there is none.
func (p *Publisher) apply(ctx context.Context, client rest.Interface, resource string, o applied, force bool) error {
	ctx, cancel := context.WithTimeout(ctx, callTime)
	defer cancel()
	body, err := json.Marshal(o)
	if err != nil {
		return err
	}
	err = client.Patch(types.ApplyPatchType).NamespaceIfScoped(o.Metadata.Namespace, o.Metadata.Namespace != "").Resource(resource).Name(o.Metadata.Name).
		Param("fieldManager", p.config.Manager).Param("force", strconv.FormatBool(force)).Body(body).Do(ctx).Error()
	switch {
	case apierrors.IsConflict(err):
		p.metrics.writes.WithLabelValues(resource, "conflict").Inc()
	case err != nil:
		p.metrics.writes.WithLabelValues(resource, "failed").Inc()
	default:
		p.metrics.writes.WithLabelValues(resource, "ok").Inc()
	}
	return err
}

// owners says who manages fields of an object: whether we have applied any, and, of those given as paths such as f:data/f:key, who else has
// one.
func owners(all []metav1.ManagedFieldsEntry, manager string, paths ...string) (ours bool, other string) {
	for _, e := range all {
		if e.Manager == manager && e.Operation == metav1.ManagedFieldsOperationApply {
			ours = true
			continue
		}
		if e.FieldsV1 == nil || other != "" {
			continue
		}
		var tree map[string]any
		if json.Unmarshal(e.FieldsV1.GetRawBytes(), &tree) != nil {
			continue
		}
		for _, path := range paths {
			if hasPath(tree, strings.Split(path, "\x00")) {
				other = e.Manager
			}
		}
	}
	return ours, other
}

// manages reports whether what we have applied still has a field: who changes one takes it from us.
func manages(all []metav1.ManagedFieldsEntry, manager, path string) bool {
	for _, e := range all {
		var tree map[string]any
		if e.Manager == manager && e.Operation == metav1.ManagedFieldsOperationApply && e.FieldsV1 != nil && json.Unmarshal(e.FieldsV1.GetRawBytes(), &tree) == nil &&
			hasPath(tree, strings.Split(path, "\x00")) {
			return true
		}
	}
	return false
}

func hasPath(tree map[string]any, path []string) bool {
	v, ok := tree[path[0]]
	if !ok || len(path) == 1 {
		return ok
	}
	below, ok := v.(map[string]any)
	return ok && hasPath(below, path[1:])
}

// contest is what happened lately about fields of ours that others took.
type contest struct {
	heals []time.Time
	held  string    // who holds them, and why we leave them; empty if they are ours
	until time.Time // when it is tried again
}

// force decides whether fields that another manager holds are taken from it now. Err says why not.
func (c *contest) force(ours bool, other string, always bool, now time.Time) (force bool, err error) {
	if other == "" {
		return false, nil
	}
	if !ours && !always {
		return false, nil // the API server says whose they are, unless the values are the same
	}
	for len(c.heals) > 0 && now.Sub(c.heals[0]) > healWindow {
		c.heals = c.heals[1:]
	}
	if len(c.heals) >= mostHeals {
		wait := healWindow
		if always {
			wait = forcedPause
			c.heals = c.heals[1:]
		}
		c.until = now.Add(wait)
		c.held = other
		return false, fmt.Errorf("%s has taken it %d times in %s, each time after we had put it back; give one of both another name or other namespaces", other, mostHeals, healWindow)
	}
	c.heals = append(c.heals, now)
	return true, nil
}
