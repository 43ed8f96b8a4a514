// One scenario by a client that oapi-codegen has generated: hook URL TOPIC. See ../scenario.py.
package main

import (
	"context"
	"fmt"
	"os"
)

func must[T any](value T, err error) T {
	if err != nil {
		panic(err)
	}
	return value
}

func pointer[T any](value T) *T { return &value }

func main() {
	ctx, url, topic := context.Background(), os.Args[1], os.Args[2]
	client := must(NewClientWithResponses(url))

	leased := func() LeasedMessage {
		var wait Leasing_Wait
		must(0, wait.FromLeasingWait0("30s"))
		answer := must(client.LeaseMessagesWithResponse(ctx, topic, Leasing{Wait: &wait}))
		return answer.JSON200.Messages[0]
	}
	ack := func(receipt string) Status {
		answer := must(client.AckLeasesWithResponse(ctx, AckLeases{Receipts: []string{receipt}}))
		return answer.JSON207.Results[0].Status
	}
	in := func(length string) *NewMessage_In {
		var in NewMessage_In
		must(0, in.FromNewMessageIn0(length))
		return &in
	}

	var lease NewTopic_Lease
	must(0, lease.FromNewTopicLease0("30s"))
	made := must(client.CreateTopicWithResponse(ctx, topic, CreateTopicJSONRequestBody{Lease: &lease}))
	fmt.Println("create", made.JSON201.Name == topic, made.JSON201.Settings.LeaseMs)

	var body PutMessagesJSONRequestBody
	must(0, body.FromNewMessages(NewMessages{
		{Id: pointer("moved"), Payload: map[string]any{"gate": "A7"}, In: in("1h")},
		{Id: pointer("cancelled"), Payload: 1, In: in("1h")},
	}))
	put := must(must(client.PutMessagesWithResponse(ctx, topic, nil, body)).JSON207.AsPutAnswers())
	fmt.Print("put")
	for _, one := range put.Results {
		fmt.Print(" ", one.Id, " ", one.Status, " ", *one.Version)
	}
	fmt.Println()

	var soon MoveMessage_In
	must(0, soon.FromMoveMessageIn1(0))
	moved := must(client.MoveMessageWithResponse(ctx, topic, "moved", nil, MoveMessage{In: &soon})).JSON200
	fmt.Println("move", moved.Status, *moved.Version)
	fmt.Println("cancel", must(client.CancelMessageWithResponse(ctx, topic, "cancelled", nil)).JSON200.Status)
	gone := must(client.ShowMessageWithResponse(ctx, topic, "cancelled"))
	fmt.Println("show", gone.ApplicationproblemJSON404.Code)
	first := leased()
	gate := first.Payload.(map[string]any)["gate"]
	fmt.Println("lease", first.Id, gate, first.Deliveries, first.LeaseUntil.After(first.Due))
	fmt.Println("ack", ack(first.Receipt), ack(first.Receipt))

	must(0, body.FromNewMessage(NewMessage{Id: pointer("letter"), PayloadText: pointer("hi"), In: in("0s")}))
	fmt.Println("put", must(client.PutMessagesWithResponse(ctx, topic, nil, body)).JSON201.Status)
	bury := BuryLeases{Receipts: []string{leased().Receipt}, Reason: "no such gate"}
	fmt.Println("bury", must(client.BuryLeasesWithResponse(ctx, bury)).JSON207.Results[0].Status)
	dead := must(client.ListDeadLettersWithResponse(ctx, topic, nil)).JSON200.Messages[0]
	fmt.Println("dead", dead.Id, *dead.Reason)
	letters := must(client.ReviveDeadLettersWithResponse(ctx, topic, nil, ReviveLetters{Ids: &[]string{"letter"}}))
	fmt.Println("revive", letters.JSON207.Counts["OK"])
	again := leased()
	fmt.Println("lease", again.Id, *again.PayloadText, again.Deliveries)
	fmt.Println("ack", ack(again.Receipt))

	var cron NewSchedule_Cron
	must(0, cron.FromNewScheduleCron0("0 9 * * *"))
	payload := map[string]any{"of": "{occurrence}"}
	daily := NewSchedule{Name: "daily", Cron: &cron, Payload: payload}
	schedule := must(client.CreateScheduleWithResponse(ctx, topic, daily)).JSON201
	fmt.Println("schedule", schedule.Name, schedule.Revision, schedule.Cron[0], schedule.Payload.(map[string]any)["of"])
	var crons ChangeSchedule_Cron
	must(0, crons.FromChangeScheduleCron1([]string{"0 9 * * *", "0 18 * * *"}))
	one := &UpdateScheduleParams{IfRevision: pointer(1)}
	change := ChangeSchedule{Cron: &crons, Zone: pointer("Europe/Berlin")}
	changed := must(client.UpdateScheduleWithResponse(ctx, topic, "daily", one, change)).JSON200
	fmt.Println("change", changed.Revision, len(changed.Cron), changed.Zone)
	four := &NextOccurrencesParams{Limit: pointer(4)}
	times := must(client.NextOccurrencesWithResponse(ctx, topic, "daily", four)).JSON200.Times
	fmt.Println("next", len(times), times[0].At.Before(times[3].At))
	fmt.Println("pause", must(client.PauseScheduleWithResponse(ctx, topic, "daily", nil)).JSON200.Status)
	fmt.Println("delete", must(client.DeleteScheduleWithResponse(ctx, topic, "daily", nil)).StatusCode())
}
